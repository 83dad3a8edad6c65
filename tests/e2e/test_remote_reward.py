"""The default recipe with its reward from a reward server in a process of its own: the rewards of this process."""

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from unirl.config.check import check_recipe
from unirl.distributed.runtime import LocalRuntime
from unirl.reward.local.shapes_scorer import ShapesRewardScorer
from unirl.reward.remote import RemoteRewardBackend
from unirl.reward.service import RewardService
from unirl.trainer.wiring import build_components, make_trainer
from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest

pytestmark = pytest.mark.slow

SERVICE = """
rewards:
  - name: shapes
    scorer: unirl.reward.local.shapes_scorer.ShapesRewardScorer
    params: {strict_weight: 1.0, soft_weight: 1.0}
    num_gpus: 0
"""
COMPARED = ("reward/", "advantage/", "policy/", "train/", "group/")
TOKEN = "a-token-for-this-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL and token file of a running `reward-server`."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "service.yaml").write_text(SERVICE)
    (folder / "token").write_text(TOKEN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "reward-server"), "--config", str(folder / "service.yaml")]
    environment = {**os.environ, "REWARD_SERVER_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}", str(folder / "token")
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    assert code == 0, (folder / "log").read_text()


def rewards_of(recipe, run_dir):
    """Metrics and rewards of two rollouts."""
    run_dir.mkdir()
    with LocalRuntime(functools.partial(build_components, recipe, str(run_dir))) as runtime:
        trainer = make_trainer({**recipe, "eval": None}, runtime, run_dir, [], threading.Event())
        runtime.role("stack").prepare()
        return [trainer.step(rollout_id) for rollout_id in range(2)]


def test_the_default_recipe_gets_the_same_rewards_from_a_server(recipe, server, tmp_path, monkeypatch):
    url, token_file = server
    monkeypatch.setenv("REWARD_URL", url)
    monkeypatch.setenv("REWARD_TOKEN_FILE", token_file)
    sizes = ["engine.forward_batch_size=3", "stack.num_updates_per_batch=1"]
    switched = ["parts/reward=remote", "reward.scorers.shapes.start_timeout_s=300", *sizes]
    expected = rewards_of(recipe("sd3_shapes", *sizes), tmp_path / "here")
    for name, overrides in (("meanwhile", []), ("after", ["reward.is_async=false"])):
        there = recipe("sd3_shapes", *switched, *overrides)
        check_recipe(there)
        got = rewards_of(there, tmp_path / name)
        assert ("reward/async/wait_s" in got[0]) is (name == "meanwhile")
        for ours, theirs in zip(got, expected, strict=True):
            own = {key: value for key, value in theirs.items() if key.startswith(COMPARED)}
            assert {key: ours[key] for key in own} == own


@pytest.mark.parametrize(("transport", "pixels"), [("binary", "lossless"), ("json", "lossless"), ("binary", "floats")])
def test_a_thousand_pictures_get_the_same_rewards_in_another_process(server, transport, pixels):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(1000, 3, 32, 32, generator=generator)
    texts = [f"a {colour} square" for colour in ("red", "green", "blue", "yellow")] * 250
    # Rectangles of the colour that is asked for or another, on noise: every score occurs.
    for row in range(1000):
        left, top = row % 13, row % 7
        drawn[row, row % 3, top + 6 : top + 18, left + 4 : left + 16] = 1.0
        drawn[row, (row + 1) % 3, top + 6 : top + 18, left + 4 : left + 16] *= 0.1
    if pixels == "lossless":
        drawn = (drawn * 255).round() / 255
    request = RewardRequest(
        sample_ids=[f"s{i}" for i in range(1000)],
        primitives={"text": Texts(texts=texts)},
        generated={"image": Images(pixels=drawn)},
    )
    url, token_file = server
    there = RemoteRewardBackend(url, ["shapes"], token_file=token_file, transport=transport, start_timeout_s=300.0)
    scored = RewardService([there]).score(request)
    expected = RewardService([ShapesRewardScorer()]).score(request)
    num_values = len(expected.rewards.unique())
    assert num_values > 10, "scores that hardly differ would hide a sample in another's place"
    for name, values in (("rewards", expected.rewards), *expected.component_rewards.items()):
        ours = scored.rewards if name == "rewards" else scored.component_rewards[name]
        assert torch.equal(ours, values), name
    there.close()
