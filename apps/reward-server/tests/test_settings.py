"""The configuration file, GPUs and access."""

import json

import pytest

from unirl.reward_server.access import checked_token, is_allowed, is_loopback, read_token, video_reader, without_paths
from unirl.reward_server.gpus import placed
from unirl.reward_server.main import main
from unirl.reward_server.settings import read_settings
from unirl.types.errors import ConfigError

from .fakes import reward


def written(tmp_path, content, name="service.yaml"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def entry(**changes):
    return {"rewards": [{"name": "a", "scorer": "shapes", "num_gpus": 0, **changes}]}


def test_the_configuration_that_comes_with_the_server_needs_no_gpu_and_no_download():
    settings = read_settings(None)
    assert {reward.name for reward in settings.rewards} >= {"shapes", "jpeg_compressibility"}
    assert all(reward.num_gpus == 0 for reward in settings.rewards) and settings.server.host == "127.0.0.1"


def test_the_published_schema_is_read(tmp_path):
    (tmp_path / "clip.txt").write_text("transformers\n")
    text = """
server: {host: 0.0.0.0, port: 9000, score_timeout_s: 30}
rewards:
  - name: clip
    scorer: clip
    runtime_env: clip.txt
    num_replicas: 2
    num_gpus: 0.5
    num_cpus: 2
    max_concurrency: 1
    scheduling: spread
    params: {model: a/folder}
  - {name: mine, scorer: my_package.rewards.Brightness, num_gpus: 2, params: {tensor_parallel_size: 2}}
"""
    settings = read_settings(written(tmp_path, text))
    clip, mine = settings.rewards
    assert (settings.server.port, settings.server.score_timeout_s) == (9000, 30)
    assert clip.target == "unirl.reward.local.images.clip.CLIPRewardScorer" and clip.params == {"model": "a/folder"}
    assert clip.runtime_env == str(tmp_path / "clip.txt") and mine.target == "my_package.rewards.Brightness"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: [", "service.yaml is not YAML"),
        ("[]", "it must hold a mapping with `rewards`, got list"),
        ({}, "rewards must be a list"),
        ({"rewards": []}, "at least one reward"),
        ({"reward": []}, "unknown key reward. Did you mean rewards?"),
        (entry() | {"cluster": {"address": "auto"}}, "unknown key cluster.address. Did you mean ray_address?"),
        (entry() | {"cluster": {"ray_address": 6379}}, "cluster.ray_address = 6379 must be a text"),
        (entry() | {"server": {"prot": 1}}, "unknown key server.prot. Did you mean port?"),
        (entry() | {"server": {"score_timeout_s": 0}}, "server.score_timeout_s = 0 must be a positive number"),
        (entry() | {"server": {"max_samples": "many"}}, "server.max_samples = 'many'"),
        (entry(nam="b"), r"unknown key rewards\[0\].nam. Did you mean name?"),
        ({"rewards": [{"name": "a"}]}, r"rewards\[0\].scorer is missing"),
        ({"rewards": entry()["rewards"] * 2}, r"each name once; twice: \['a'\]"),
        (entry(name="a/b"), "cannot be called 'a/b'"),
        (entry(scorer="shape"), "no scorer is called 'shape'. Did you mean shapes"),
        (entry(num_replicas=0), "reward a: num_replicas = 0 must be a whole number"),
        (entry(max_batch=0), "max_batch = 0"),
        (entry(num_gpus=1.5), "num_gpus = 1.5 must be a fraction"),
        (entry(scheduling="fill"), "scheduling = 'fill' must be one of"),
        (entry(load="lazy"), "load = 'lazy' must be one of"),
        (entry(params=[1]), "must be a mapping of constructor keywords"),
        (entry(params={"tensor_parallel_size": 4}), "tensor_parallel_size = 4 needs as many GPUs"),
        (entry(runtime_env="no.txt"), "there is no such requirements file"),
        (entry(python="/bin/python", packages=["x"]), "give python, or runtime_env and packages"),
    ],
)
def test_a_wrong_configuration_names_the_key_and_the_fix(tmp_path, content, text):
    with pytest.raises(ConfigError, match=text):
        read_settings(written(tmp_path, content))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read configuration .*nothing.yaml"):
        read_settings(str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--host", "0.0.0.0"], "host = 0.0.0.0 can be reached from other machines, which needs a token"),
        (["--port", "-1"], "server.port = -1 must be a positive number"),
    ],
)
def test_the_command_exits_with_2_and_the_message(arguments, text, capsys, monkeypatch):
    monkeypatch.delenv("REWARD_SERVER_TOKEN", raising=False)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and text in capsys.readouterr().err


def test_replicas_share_gpus_as_their_configuration_says():
    rewards = [reward("half", num_gpus=0.5, num_replicas=3), reward("two", num_gpus=2), reward("cpu", num_replicas=2)]
    assert placed(rewards, ["0", "1", "2", "3"]) == {
        "half": [["2"], ["2"], ["3"]],
        "two": [["0", "1"]],
        "cpu": [[], []],
    }
    spread = [reward("s", num_gpus=0.25, num_replicas=3, scheduling="spread")]
    assert placed(spread, ["a", "b"]) == {"s": [["a"], ["b"], ["a"]]}
    with pytest.raises(ConfigError, match="reward r: 2 replicas with num_gpus = 1 do not fit on the 1 GPUs"):
        placed([reward(num_gpus=1, num_replicas=2)], ["0"])
    with pytest.raises(ConfigError, match="on the 0 GPUs .* Set num_gpus: 0 for the CPU"):
        placed([reward(num_gpus=0.1)], [])


def test_only_addresses_of_this_machine_go_without_a_token(tmp_path):
    for host, is_local in (("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.8.8.8", True), ("::", False)):
        assert is_loopback(host) is is_local
    assert not is_loopback("10.0.0.1") and not is_loopback("example.com")
    assert checked_token("localhost", None) is None and checked_token("0.0.0.0", "x" * 16) == "x" * 16
    with pytest.raises(ConfigError, match="the token has 3 characters; use at least 16"):
        checked_token("0.0.0.0", "abc")
    path = tmp_path / "token"
    path.write_text("  a long enough token \nsecond line\n")
    assert read_token(str(path)) == "a long enough token"
    with pytest.raises(ConfigError, match="server.token_file = .* cannot be read"):
        read_token(str(tmp_path / "none"))
    assert is_allowed(None, None) and is_allowed("bearer a long enough token", "a long enough token")
    assert not is_allowed("Bearer a long enough tokem", "a long enough token")
    with pytest.raises(ConfigError, match="are no folders"):
        video_reader([str(path)], 10)


def test_messages_for_strangers_hold_no_folders():
    text = "OSError: [Errno 2] No such file: '/srv/models/clip/a b.bin'\n at ~/x/y.py, half/full 3/4"
    assert without_paths(text) == "OSError: [Errno 2] No such file: 'a b.bin' at y.py, half/full 3/4"
    assert len(without_paths("x " * 1000)) == 600
