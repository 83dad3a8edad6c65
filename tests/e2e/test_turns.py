"""Runs whose samples are episodes of several turns: equal by every engine and schedule, and whoever dies."""

import importlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import stopping
import torch

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.rollout.environments.tools.base import ToolError
from unirl.rollout.environments.workers import EnvironmentWorkers
from unirl.rollout.turns.calls import Turn
from unirl.trainer.commands import export_recipe
from unirl.types.episodes import EPISODE

SMALL = [
    "batch_size=4",
    "sampling.samples_per_prompt=16",
    "stack.micro_batch_size=32",
    "stack.num_updates_per_batch=2",
    "engine.forward_batch_size=64",
    "num_rollouts=3",
    "eval.interval=0",
    "eval.num_samples=8",
    "eval.batch_size=8",
    "samples.per_evaluation=4",
    "guardrails.action=off",
]
OF_MACHINE = ("sync/", "schedule/", "/utilisation", "environment_s")
REPLICA = [
    "parts/engine=text_replica_cpu",
    "algorithm.old_logp_source=replay",
    'sync.canary_prompts=["37+58=", "90+4="]',
    "sync.canary_tolerance=1.0e-4",
]


def run(run_dir, *words, recipe="worlds/tools/grpo"):
    """Step -> metrics of training and of what was sampled."""
    register_resolvers()
    _, records = stopping.run(resolve(compose(recipe, [*SMALL, *words])), run_dir)
    return {
        step: {name: value for name, value in found.items() if not any(part in name for part in OF_MACHINE)}
        for step, found in ((step, stopping.comparable(own)) for step, own in records.items())
    }


def test_engines_and_schedules_have_the_same_bits(tmp_path):
    direct = run(tmp_path / "direct", "algorithm.old_logp_source=replay")
    assert run(tmp_path / "replica", *REPLICA) == direct
    assert run(tmp_path / "ahead", *REPLICA, "schedule.kind=async", "schedule.max_staleness=0") == direct
    assert max(value for step in direct.values() for name, value in step.items() if name.endswith("rollout/turns")) > 1


@pytest.mark.slow
def test_a_tool_behind_a_server_has_the_bits_of_the_same_tool(tmp_path):
    found = run(tmp_path / "server", recipe="worlds/tools/mcp")
    for step, record in run(tmp_path / "own").items():
        assert found[step].pop("text/rollout/unavailable_tools", 0.0) == 0.0
        assert found[step] == record


@pytest.mark.ray
@pytest.mark.nightly
def test_rewards_of_turns_reach_the_critic_from_other_workers(tmp_path):
    """A copy of the model that writes elsewhere: its turns and their rewards train with the bits of one process."""
    words = ["num_rollouts=2", *REPLICA[:1], *REPLICA[2:]]
    apart = [f"component_placement.{name}={place}" for name, place in (("actor", 0), ("rollout", 1), ("env", 1))]
    found = run(tmp_path / "apart", *words, *apart, recipe="worlds/tools/ppo")
    assert found == run(tmp_path / "one", *words, recipe="worlds/tools/ppo")
    assert found[1]["text/rollout/calls"] > 0 and "ppo/explained_variance" in found[1]


@pytest.mark.ray
def test_turns_in_other_workers_have_the_bits_of_one_process(tmp_path):
    """The engine that is pushed to is asked for canaries without turns."""
    apart = [f"component_placement.{name}={place}" for name, place in (("actor", 0), ("rollout", 1), ("env", 1))]
    assert run(tmp_path / "apart", *REPLICA, *apart) == run(tmp_path / "one", *REPLICA)


def test_images_between_turns_are_sampled_trained_and_recorded(tmp_path):
    """A replica has a copy of the model, and gets each turn's tokens and images as an engine elsewhere does."""
    words = ["algorithm.old_logp_source=replay", "media_interval=1", "num_rollouts=2", "eval.pass_prompts=4"]
    direct = run(tmp_path / "direct", *words, recipe="worlds/zoom/grpo")
    canary = 'sync.canary_prompts=["which letter?", "what is it?"]'
    assert run(tmp_path / "replica", *words, *REPLICA, canary, recipe="worlds/zoom/grpo") == direct
    assert direct[1]["policy/first_ratio_max_abs_dev"] == 0 and direct[1]["text/rollout/calls"] > 0
    lines = (tmp_path / "direct" / "samples" / "rollout-000001.jsonl").read_text().splitlines()
    shown = []
    for record in map(json.loads, lines):
        said = record["metadata"][EPISODE]["transcript"]
        assert len(record["given"]) == sum(turn.get("images", 0) for turn in said) and said[0]["images"] == 1
        shown += [turn for turn in said if turn["role"] == "tool"]
    assert any(turn.get("images") == 1 and turn["content"] == "" for turn in shown)


def test_a_run_notices_no_death_of_its_environments(tmp_path, monkeypatch):
    undisturbed = run(tmp_path / "undisturbed")
    step, deaths = EnvironmentWorkers.step, []

    def step_of_the_dying(self, actions):
        os.kill(self.pids[len(deaths) % len(self.pids)], signal.SIGKILL)
        deaths.append(self)
        return step(self, actions)

    monkeypatch.setattr(EnvironmentWorkers, "step", step_of_the_dying)
    assert run(tmp_path / "dying", "+turns.num_workers=2") == undisturbed
    assert len(deaths) > 5


def test_records_have_what_each_side_said(tmp_path):
    run(tmp_path, "media_interval=1", "num_rollouts=1")
    records = [json.loads(line) for line in (tmp_path / "samples" / "rollout-000001.jsonl").read_text().splitlines()]
    said = [record["metadata"][EPISODE]["transcript"] for record in records]
    assert all(turns[0]["role"] == "user" and turns[1]["role"] == "assistant" for turns in said)
    assert any(turns[2]["role"] == "tool" for turns in said if len(turns) > 2)


def test_the_examples_of_the_guide_play(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/guides/environments.md").read_text(encoding="utf-8")
    for name, code in re.findall(r"```python (\w+)\.py\n(.*?)```", page, re.DOTALL):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    tool, game = importlib.import_module("my_tools").Capital(), importlib.import_module("my_game").Guess(50)
    assert tool({"country": "Peru"}, {}) == "Lima"
    with pytest.raises(ToolError, match="no country 'Atlantis' is known"):
        tool({"country": "Atlantis"}, {})
    workers = EnvironmentWorkers(game, num_workers=1, step_timeout_s=20.0)
    try:
        begun: dict[str, Any] = workers.reset({"a": ({}, 7), "b": ({}, 7)})
        assert begun["a"][0].content == "Guess a number from 1 to 50."
        low, high = 1, 50
        while True:
            guess = (low + high) // 2
            step: dict[str, Any] = workers.step(dict.fromkeys("ab", Turn(str(guess))))
            assert step["a"] == step["b"], "a group begins equally"
            if step["a"].terminated:
                break
            low, high = (low, guess - 1) if "high" in step["a"].observation[0].content else (guess + 1, high)
        assert step["a"].reward == 1.0 and low <= guess <= high
    finally:
        workers.close()


def test_fine_tuning_on_conversations_lowers_their_loss_and_samples_for_evaluations_alone(tmp_path):
    words = ["batch_size=32", "sampling.samples_per_prompt=1", "stack.num_updates_per_batch=1", "num_rollouts=6"]
    found = run(tmp_path, *words, "media_interval=6", recipe="sft/tools")
    losses = [found[step]["train/loss"] for step in range(1, 7)]
    assert losses[-1] < 0.7 * losses[0]
    ends = {}
    for name in ("rollout-000006", "eval-000006"):
        lines = (tmp_path / "samples" / f"{name}.jsonl").read_text().splitlines()
        ends[name] = {json.loads(line)["metadata"][EPISODE]["end"] for line in lines}
    assert ends["rollout-000006"] == {"given"} and "given" not in ends["eval-000006"]


def test_conversations_with_images_are_learned_from_nothing_recorded_resumed_and_exported(tmp_path):
    register_resolvers()
    words = [
        *("batch_size=32", "num_rollouts=6", "media_interval=6", "save.interval=3", "stack.micro_batch_size=32"),
        *("eval.interval=6", "eval.num_samples=8", "eval.batch_size=8", "eval.pass_prompts=8", "guardrails.action=off"),
        "backend.scheduler=null",  # whose warm-up takes longer
    ]
    _, records = stopping.run(resolve(compose("sft/zoom", words)), tmp_path / "whole")
    assert records[6]["train/loss"] < 0.8 * records[1]["train/loss"]
    for line in map(json.loads, (tmp_path / "whole" / "samples" / "rollout-000006.jsonl").read_text().splitlines()):
        said = line["metadata"][EPISODE]["transcript"]
        assert [turn["role"] for turn in said] in (["user", "assistant"], ["user", "assistant", "tool", "assistant"])
        assert [turn.get("images", 0) for turn in said] == [1, 0, 1, 0][: len(said)]
        assert len(line["given"]) == len(said) / 2
    stopping.run(resolve(compose("sft/zoom", words)), tmp_path / "stopped", 3)
    _, resumed = stopping.run(resolve(compose("sft/zoom", [*words, "resume=auto"])), tmp_path / "stopped")
    assert resumed[6]["train/loss"] == records[6]["train/loss"]
    folder = tmp_path / "exported"
    export_recipe(run_of(resolve(compose("sft/zoom", words))), tmp_path / "whole", folder, merged=True)
    trained, drawn = (QwenVLBundle(str(folder), random_weights=seed).model.state_dict() for seed in (None, 42))
    assert not any(torch.equal(drawn[name], value) for name, value in trained.items() if value.ndim > 1)
