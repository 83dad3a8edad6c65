"""The default recipe with its reward from a reward server, or from a child process: the rewards of this process."""

import functools
import threading

import pytest
from servers import running_server

from unirl.config.check import check_recipe
from unirl.config.runs import run_of
from unirl.distributed.runtime import LocalRuntime
from unirl.trainer.build.assembly import make_trainer
from unirl.trainer.build.worker import build_components

pytestmark = pytest.mark.slow

SERVICE = """
rewards:
  - name: shapes
    scorer: unirl.reward.worlds.shapes_scorer.ShapesRewardScorer
    params: {strict_weight: 1.0, soft_weight: 1.0}
    num_gpus: 0
"""
COMPARED = ("reward/", "advantage/", "policy/", "train/", "group/")
TOKEN = "a-token-for-this-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL and token file of a running `reward-server`."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "token").write_text(TOKEN)
    with running_server(folder, SERVICE, REWARD_SERVER_TOKEN=TOKEN) as running:
        yield running.url, str(folder / "token")


def rewards_of(recipe, run_dir):
    """Metrics and rewards of two rollouts."""
    run_dir.mkdir()
    with LocalRuntime(functools.partial(build_components, run_of(recipe), str(run_dir))) as runtime:
        trainer = make_trainer(run_of({**recipe, "eval": None}), runtime, run_dir, [], threading.Event())
        runtime.role("stack").prepare()
        return [trainer.step(rollout_id) for rollout_id in range(2)]


def test_the_default_recipe_gets_the_same_rewards_from_a_server(recipe, server, tmp_path, monkeypatch):
    url, token_file = server
    monkeypatch.setenv("REWARD_URL", url)
    monkeypatch.setenv("REWARD_TOKEN_FILE", token_file)
    sizes = ["engine.forward_batch_size=3", "stack.num_updates_per_batch=1"]
    switched = ["parts/reward=remote", "reward.scorers.shapes.start_timeout_s=300", *sizes]
    expected = rewards_of(recipe("worlds/shapes/nft", *sizes), tmp_path / "here")
    for name, overrides in (("meanwhile", []), ("after", ["reward.is_async=false"])):
        there = recipe("worlds/shapes/nft", *switched, *overrides)
        check_recipe(there)
        got = rewards_of(there, tmp_path / name)
        assert ("reward/async/wait_s" in got[0]) is (name == "meanwhile")
        for ours, theirs in zip(got, expected, strict=True):
            own = {key: value for key, value in theirs.items() if key.startswith(COMPARED)}
            assert {key: ours[key] for key in own} == own


def test_the_default_recipe_gets_the_same_rewards_from_a_child_process(recipe, tmp_path):
    sizes = ["engine.forward_batch_size=3", "stack.num_updates_per_batch=1"]
    there = recipe("worlds/shapes/nft", "parts/reward=shapes_child", *sizes)
    check_recipe(there)
    expected = rewards_of(recipe("worlds/shapes/nft", *sizes), tmp_path / "here")
    for ours, theirs in zip(rewards_of(there, tmp_path / "there"), expected, strict=True):
        own = {key: value for key, value in theirs.items() if key.startswith(COMPARED)}
        assert {key: ours[key] for key in own} == own
