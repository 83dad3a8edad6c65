"""Turns by a served pool of the real vLLM, answered by a pool of environments whose process and member die."""

from pathlib import Path

import pytest
from recipe_runs import finish, output_of, records, train

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.nightly]
NUM_ROLLOUTS = 2
SMALL = [
    f"num_rollouts={NUM_ROLLOUTS}",
    *("batch_size=8", "stack.num_updates_per_batch=1", "guardrails.action=off"),
    *("eval.num_samples=16", "eval.batch_size=16", "eval.interval=0"),
    *("runtime=ray", "num_devices=3", "cluster.cpus_per_device=0.5"),
    *("+pools.train={devices: 0}", "+pools.rollout={devices: 1-2, served: true}"),
    *("parts/environments=pool", "+pools.env.members=2", "pools.env.processes=2"),
]


def test_what_dies_in_a_pool_of_environments_costs_served_engines_nothing(vllm_python, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    words = ["worlds/tools/vllm", f"engine.python={vllm_python}", *SMALL]
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    finish(train(quiet, *words), quiet)
    tool = "turns.environment.tools.add"
    ending = [f"{tool}._target_=ending_tools.EndingAdder", f"+{tool}.calls={tmp_path / 'calls'}"]
    finish(train(killed, *words, *ending), killed)
    said = output_of(killed)
    assert "ended by signal SIGKILL; the process is replaced" in said
    found, expected = records(killed), records(quiet)
    assert (tmp_path / "calls").stat().st_size > 6
    assert found[NUM_ROLLOUTS]["perf/pool/env/restarts"] == 1 and found[NUM_ROLLOUTS]["perf/pool/env/members"] == 2
    assert expected[NUM_ROLLOUTS]["perf/pool/env/restarts"] == 0
    for name in ("reward/mean", "text/rollout/calls", "text/rollout/turns", "text/rollout/written_tokens"):
        assert found[1][name] == expected[1][name], name
