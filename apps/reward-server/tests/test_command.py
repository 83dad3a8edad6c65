"""The command with real replicas: the README, equal numbers, a killed replica, the end."""

import concurrent.futures
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unirl.reward.client import RewardClient
from unirl.reward.local.images.compressibility import JPEGCompressibilityScorer
from unirl.reward.wire import BINARY_TYPE, JSON_TYPE, WireSample, decode_answer, encode_binary, encode_json, samples_of
from unirl.reward.worlds.shapes_scorer import ShapesRewardScorer
from unirl.reward_server.frames import Frame, receive_frame, send_frame
from unirl.reward_server.replica import worker_command, worker_environment
from unirl.types.errors import ContractError
from unirl.types.media import Audios, Images, Texts, Videos
from unirl.types.reward import RewardRequest

from .fakes import held_port, reward, sample

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMAND = [sys.executable, "-c", "from unirl.reward_server.main import main; main()"]
SCORERS = {"shapes": ShapesRewardScorer(), "jpeg_compressibility": JPEGCompressibilityScorer()}


def opened(url, data=None, kind=JSON_TYPE):
    call = urllib.request.Request(url, data=data, headers={"Content-Type": kind})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(call, timeout=600) as answer:
        return answer.read()


class Running:
    """A server in a process; its log is read until it listens."""

    def __init__(self, folder, config, port):
        path = folder / "service.yaml"
        path.write_text(config)
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [*COMMAND, "--config", str(path), "--port", str(port)], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.log = ""
        for line in self.process.stderr:
            self.log += line
            if "serving" in line:
                break
        self.ready = opened(f"{self.url}/ready")
        # What follows is read on, so that the pipe never fills.
        self.rest = concurrent.futures.ThreadPoolExecutor(1).submit(self.process.stderr.read)

    def status(self):
        return json.loads(opened(f"{self.url}/status.json"))

    def until(self, condition):
        """What the status says of the reward `shapes` once the condition holds."""
        end = time.monotonic() + 600
        while True:
            [shapes] = [each for each in self.status()["rewards"] if each["name"] == "shapes"]
            if condition(shapes):
                return shapes
            assert time.monotonic() < end, shapes
            time.sleep(0.02)

    def score(self, request, kind, pixels="uint8"):
        samples = samples_of(request, pixels)
        encoded = (
            b"".join(encode_binary(samples, list(SCORERS)))
            if kind == BINARY_TYPE
            else encode_json(samples, list(SCORERS))
        )
        return decode_answer(opened(f"{self.url}/score", encoded, kind), request.sample_ids, list(SCORERS))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    [config] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    with held_port() as port:
        running = Running(tmp_path_factory.mktemp("server"), config, port)
        yield running
        running.process.terminate()
        assert running.process.wait(timeout=600) == 0
    assert "Traceback" not in running.rest.result()


def test_serving_is_said_once_every_reward_can_be_scored(server):
    assert json.loads(server.ready) == {"status": "ready"}
    lines = [line.partition(": ")[2] for line in server.log.splitlines()]
    loading = [line for line in lines if line.startswith("loading ['shapes']")]
    assert len(loading) == 1 and lines[-1].startswith("serving ['shapes', 'jpeg_compressibility'] on http://127.0.0.1:")
    assert any(re.match(r"reward shapes: replica \d can score after [\d.]+ s", line) for line in lines)


def pictures(num, seed=0):
    prompts = ["a red circle", "three blue squares", "a green triangle"]
    pixels = torch.randint(0, 256, (num, 3, 32, 32), generator=torch.Generator().manual_seed(seed)).float() / 255
    return RewardRequest(
        sample_ids=[f"s{i}" for i in range(num)],
        primitives={"text": Texts(texts=[prompts[i % 3] for i in range(num)])},
        generated={"image": Images(pixels=pixels)},
    )


def rectangles(num, as_bytes):
    """Rectangles of the colour that is asked for or another, on noise: every score occurs."""
    pixels = torch.rand(num, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for row in range(num):
        box = (row, ..., slice(row % 7 + 6, row % 7 + 18), slice(row % 13 + 4, row % 13 + 16))
        pixels[box] *= torch.tensor([0.1, 0.1, 0.1]).index_fill(0, torch.tensor(row % 3), 1.0)[:, None, None]
        pixels[row, row % 3, box[2], box[3]] = 1.0
    return RewardRequest(
        sample_ids=[f"s{i}" for i in range(num)],
        primitives={"text": Texts(texts=[f"a {('red', 'green', 'blue', 'yellow')[i % 4]} square" for i in range(num)])},
        generated={"image": Images(pixels=(pixels * 255).round() / 255 if as_bytes else pixels)},
    )


def assert_same(found, expected):
    assert torch.equal(found.rewards, expected.rewards) and found.successes == expected.successes
    assert list(found.component_rewards) == list(expected.component_rewards)
    for key, values in expected.component_rewards.items():
        assert torch.equal(found.component_rewards[key], values)


def test_the_readme_works_as_it_stands(server, capsys, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    names: dict[str, Any] = {"__name__": "readme"}
    for program in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(program.replace("http://127.0.0.1:8080", server.url), names)
    [scored] = names["scored"]["results"]
    assert names["scored"]["errors"] == [{}] and scored["jpeg_compressibility"]["reward"] < 0
    assert list(scored["shapes"]) == ["reward", "strict", "soft"]
    assert all(names["response"].successes) and "shapes" in capsys.readouterr().out


@pytest.mark.parametrize(("transport", "pixels"), [("binary", "bytes"), ("json", "bytes"), ("binary", "floats")])
def test_a_thousand_pictures_get_the_same_numbers_through_the_server_bit_for_bit(server, transport, pixels):
    request = rectangles(1000, as_bytes=pixels == "bytes")
    client = RewardClient(server.url, transport=transport)
    found = client.score(request, list(SCORERS))
    client.close()
    for name, scorer in SCORERS.items():
        expected = scorer.score(request)
        assert len(expected.rewards.unique()) > 10, "scores that hardly differ would hide a sample in another's place"
        assert_same(found[name], expected)


def test_a_replica_killed_under_load_loses_and_doubles_nothing(server):
    requests = [pictures(8, seed=i) for i in range(24)]
    replicas = server.until(lambda shapes: [each["state"] for each in shapes["replicas"]] == ["ready", "ready"])
    before = {each["pid"] for each in replicas["replicas"]}
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(server.score, request, BINARY_TYPE) for request in requests]
        concurrent.futures.wait(calls[:4], return_when=concurrent.futures.FIRST_COMPLETED)
        os.kill(min(before), signal.SIGKILL)
        answers = [call.result() for call in calls]
    for request, answer in zip(requests, answers, strict=True):
        for name, scorer in SCORERS.items():
            assert_same(answer[name], scorer.score(request))
    shapes = server.until(lambda shapes: sum(each["restarts"] for each in shapes["replicas"]) == 1)
    assert shapes["failed"] == 0


def test_a_scorer_that_cannot_be_built_ends_the_command_with_its_message(tmp_path):
    config = "rewards: [{name: a, scorer: jpeg_compressibility, num_gpus: 0, params: {qualty: 3}}]"
    path = tmp_path / "service.yaml"
    path.write_text(config)
    with held_port() as port:
        command = [*COMMAND, "--config", str(path), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "reward-server: reward a: ConfigError: scorer unirl.reward." in done.stderr
    assert "unexpected keyword argument 'qualty'" in done.stderr


def test_a_worker_answers_several_tasks_at_a_time_and_ends_with_its_server():
    ours, theirs = socket.socketpair()
    settings = reward("shapes", max_concurrency=2)
    with theirs:
        worker = subprocess.Popen(
            [*worker_command(settings), "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=worker_environment(settings, []),
        )
    with ours:
        start = {"name": "shapes", "target": settings.target, "params": {}, "device": "cpu", "num_cpus": 1}
        send_frame(ours, Frame.START, 0, json.dumps(start | {"max_concurrency": 2, "warm_up": True}).encode())
        kind, _, card = receive_frame(ours)
        assert kind == Frame.READY and json.loads(bytes(card))["components"] == ["strict", "soft"]
        for task, prompt in ((5, "a red circle"), (6, "nonsense")):
            samples = [sample("a", size=32, prompt=prompt)]
            send_frame(ours, Frame.SCORE, task, b"".join(encode_binary(samples, ["shapes"])))
        answers = {}
        for _ in range(2):
            kind, task, content = receive_frame(ours)
            answers[task] = json.loads(bytes(content))
        assert answers[5] == [{"reward": 0.0, "strict": 0.0, "soft": 0.0}]
        assert "is not a sentence of the shapes world" in answers[6][0]
    assert worker.wait(timeout=600) == 0


LOUD = """
import torch
from unirl.reward.base import LocalScorer

class Loud(LocalScorer):
    def __init__(self, *, name="loud", device="cpu"):
        super().__init__(name=name, device=device, component_weights={"power": 1.0, "seconds": 0.5})

    def score_batch(self, request):
        sounds = request.generated["video"].audio
        waveforms = sounds.unpack("waveform")
        seconds = torch.tensor([len(each) / sounds.sample_rate for each in waveforms])
        return {"power": torch.stack([each.square().mean() for each in waveforms]), "seconds": seconds}
"""


def test_sounds_get_the_same_numbers_through_a_server_in_another_process_bit_for_bit(tmp_path, monkeypatch):
    (tmp_path / "loud.py").write_text(LOUD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    generator = torch.Generator().manual_seed(0)
    waveforms = [torch.randn(length, 2, generator=generator) for length in (700, 3, 24_000)]
    request = RewardRequest(
        sample_ids=list("abc"),
        generated={
            "video": Videos.pack(
                frames=[torch.rand(2, 3, 4, 4, generator=generator) for _ in waveforms],
                fps=8.0,
                audio=Audios.pack(waveform=waveforms, sample_rate=24_000),
            )
        },
    )
    expected = importlib.import_module("loud").Loud().score(request)
    config = "rewards:\n  - {name: loud, scorer: loud.Loud, num_gpus: 0}\nserver: {max_sound_s: 2}\n"
    with held_port() as port:
        running = Running(tmp_path, config, port)
        with RewardClient(running.url) as client:
            assert_same(client.score(request, ["loud"])["loud"], expected)
            long = Videos.pack(
                frames=[torch.zeros(1, 3, 4, 4)], audio=Audios.pack(waveform=[torch.zeros(48_001)], sample_rate=24_000)
            )
            with pytest.raises(ContractError, match="sound.0 lasts 2 s; the limit is max_sound_s = 2"):
                client.score(RewardRequest(sample_ids=["d"], generated={"video": long}), ["loud"])
        running.process.terminate()
        assert running.process.wait(timeout=600) == 0
    assert "Traceback" not in running.log + running.rest.result()


def resident_bytes(pid):
    """Memory of a process now, and the most that it had."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return [int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")]


def test_a_replica_holds_the_floats_of_a_large_video_once_and_gives_them_back(tmp_path):
    (tmp_path / "counts.py").write_text("def frames(videos, prompts, metadata):\n    return list(map(len, videos))\n")
    ours, theirs = socket.socketpair()
    settings = reward("counts", max_concurrency=2)
    with theirs:
        worker = subprocess.Popen(
            [*worker_command(settings), "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=worker_environment(settings, []) | {"PYTHONPATH": str(tmp_path)},
        )
    with ours:
        start = {"name": "counts", "target": "unirl.reward.function.FunctionRewardScorer", "device": "cpu"}
        options = {"params": {"function": "counts.frames"}, "num_cpus": 1, "max_concurrency": 2, "warm_up": True}
        send_frame(ours, Frame.START, 0, json.dumps(start | options).encode())
        assert receive_frame(ours)[0] == Frame.READY
        before, _ = resident_bytes(worker.pid)
        media = np.full((24, 1024, 1024, 3), 9, np.uint8)
        large = WireSample(id="a", kind="video", media=media, prompt="p")
        for task in range(3):
            send_frame(ours, Frame.SCORE, task, b"".join(encode_binary([large], ["counts"])))
            assert json.loads(bytes(receive_frame(ours)[2])) == [{"reward": 24.0}]
        end = time.monotonic() + 60
        while resident_bytes(worker.pid)[0] - before > media.nbytes / 2:
            assert time.monotonic() < end, resident_bytes(worker.pid)
            time.sleep(0.05)
        # The body, two copies of its bytes and their floats; a second copy of the floats would make it eleven.
        assert resident_bytes(worker.pid)[1] - before < 9 * media.nbytes
    assert worker.wait(timeout=600) == 0


def test_replicas_run_in_the_environment_that_their_reward_asks_for(monkeypatch):
    monkeypatch.setenv("REWARD_SERVER_TOKEN", "secret")
    monkeypatch.delenv("UV", raising=False)
    assert worker_command(reward())[:2] == [sys.executable, "-m"]
    assert worker_command(reward(python="/opt/env/bin/python"))[0] == "/opt/env/bin/python"
    command = worker_command(reward(runtime_env="/etc/r.txt", packages=["x==1", "y"]))
    assert " ".join(command).startswith("uv run --no-project --python")
    assert " ".join(command).endswith(
        "--with-requirements /etc/r.txt --with x==1 --with y python -m unirl.reward_server.worker"
    )
    monkeypatch.setenv("UV", "/opt/tools/uv")
    assert worker_command(reward(packages=["y"]))[:2] == ["/opt/tools/uv", "run"]
    environment = worker_environment(reward(num_cpus=3), ["2", "5"])
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("2,5", "3")
    assert environment["ASCEND_RT_VISIBLE_DEVICES"] == environment["ZE_AFFINITY_MASK"] == "2,5"
    assert "REWARD_SERVER_TOKEN" not in environment


def test_packages_of_a_reward_stand_before_those_of_the_server(uv, tmp_path, monkeypatch):
    monkeypatch.setenv("UV", uv)
    wheel = tmp_path / "iniconfig-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("iniconfig/__init__.py", "origin = 'of the reward'")
        archive.writestr("iniconfig-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: iniconfig\nVersion: 0.1\n")
        archive.writestr("iniconfig-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("iniconfig-0.1.dist-info/RECORD", "")
    settings = reward(packages=[str(wheel)])
    *interpreter, _, module = worker_command(settings)
    program = f"import iniconfig, {module}; print(iniconfig.origin)"
    environment = worker_environment(settings, []) | {"UV_OFFLINE": "1"}
    done = subprocess.run([*interpreter, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.returncode) == ("of the reward\n", 0), done.stderr
