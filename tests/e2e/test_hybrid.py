"""A run whose training device is lent to an engine while it waits, on two Ray workers."""

import pytest
import stopping
from test_schedules import MACHINE, SMALL_TEXT

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve

WORDS = ["parts/engine=text_replica_cpu", *SMALL_TEXT, "stack.num_updates_per_batch=1", "num_rollouts=5"]
OF_ENGINES = (*MACHINE, "sync/", "log_prob_gap", "environment_s")


def run(run_dir, *words):
    """The records, and of each step what measures neither the machine nor who made the samples."""
    register_resolvers()
    recipe = resolve(compose("worlds/tools/grpo", [*WORDS, *words]))
    _, records = stopping.run(recipe, run_dir)
    own = {step: stopping.comparable(metrics) for step, metrics in records.items()}
    return records, {
        step: {name: value for name, value in metrics.items() if not any(part in name for part in OF_ENGINES)}
        for step, metrics in own.items()
    }


@pytest.mark.matrix
@pytest.mark.usefixtures("ray_of_two_cores")
def test_a_run_that_lends_its_device_has_the_numbers_of_one_that_does_not(tmp_path):
    _, sync = run(tmp_path / "sync")
    pools = "pools={train:{devices:0},rollout:{devices:0-1,served:true,samples_per_call:8},reward:{devices:1}}"
    ahead = ["schedule.kind=hybrid", "schedule.max_staleness=0", "runtime=ray", "num_devices=2", f"+{pools}"]
    records, hybrid = run(tmp_path / "hybrid", *ahead)
    lent = [metrics["schedule/hybrid/lent"] for step, metrics in sorted(records.items()) if step]
    assert lent[0] == 1.0 and len(lent) == 5
    for step, metrics in sync.items():
        # A call that was cut short is continued by another forward, which rounds otherwise.
        assert hybrid[step] == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in metrics.items()}
