"""Trainer, engine and reward, each with its own workers, give the bits of one worker that holds them all."""

import functools
import json
import threading

from unirl.config.runs import run_of
from unirl.distributed.groups import WorkerGroups
from unirl.distributed.rewards import LedRewards
from unirl.distributed.runtime import LocalRuntime
from unirl.tracking.jsonl import JsonlTracker
from unirl.trainer.build.assembly import make_trainer
from unirl.trainer.build.worker import build_components

OF_THE_MACHINE = ("timing_s/", "perf/", "sync/seconds", "reward/shapes/utilisation")


def metrics_of(recipe, runtime, run_dir):
    """Every metric of a run but those of the machine, one record per line."""
    run_dir.mkdir()
    with runtime:
        make_trainer(run_of(recipe), runtime, run_dir, [JsonlTracker()], threading.Event()).run()
        assert runtime.num_held() == 0
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in each.items() if not key.startswith(OF_THE_MACHINE)} for each in records]


def test_three_groups_train_to_the_bits_of_one(recipe, tmp_path):
    small = recipe("worlds/shapes/replica", "selection.best_of=2", "stack.num_updates_per_batch=2")
    build = functools.partial(build_components, run_of(small), str(tmp_path / "checkpoints"))
    expected = metrics_of(small, LocalRuntime(build), tmp_path / "together")
    train, rollout, reward = (
        LocalRuntime(functools.partial(build, holds=(held,))) for held in ("train", "engine", "reward")
    )
    train.role("sync").connect(rollout.component("engine"))
    apart = WorkerGroups(train, {"engine": rollout, "reward": reward})
    assert metrics_of(small, apart, tmp_path / "apart") == expected


def test_scorers_in_two_groups_train_to_the_bits_of_one(recipe, tmp_path):
    small = recipe("worlds/shapes/gdpo")
    build = functools.partial(build_components, run_of(small), str(tmp_path / "checkpoints"))
    expected = metrics_of(small, LocalRuntime(build), tmp_path / "together")
    split = {**small, "reward": {**small["reward"], "pools": {"soft": "judge"}}}
    build = functools.partial(build_components, run_of(split), str(tmp_path / "checkpoints-apart"))
    train = LocalRuntime(functools.partial(build, holds=("train", "engine", "reward")))
    judge = LocalRuntime(functools.partial(build, holds=("reward.pools.soft",)))
    led = LedRewards([judge.role("reward")], train.role("reward"))
    apart = WorkerGroups(train, {}, led={"reward": led}, pools={"judge": judge})
    found = metrics_of(split, apart, tmp_path / "apart")
    assert [{key: value for key, value in each.items() if "perf/" not in key} for each in found] == expected
