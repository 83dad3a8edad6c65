"""Environments in a pool give the bits of processes next to the engine; on other nodes, see `test_episode_runtimes`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import stopping
import test_actions
import test_turns

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve

TURNS = [*test_turns.SMALL, "batch_size=2", "sampling.samples_per_prompt=8", "num_rollouts=1"]
ACTIONS = [*test_actions.SMALL, "batch_size=2", "sampling.samples_per_prompt=4", "num_rollouts=1"]
RECIPES = {
    "worlds/tools/grpo": (TURNS, [], ["turns.pool=env"]),
    "vla/tabletop_push_grpo": (
        ACTIONS,
        test_actions.PROCESSES,
        [test_actions.PROCESSES[0], "engine.environment.pool=env"],
    ),
}


def run(name, run_dir, *words):
    """Rollout -> all metrics."""
    register_resolvers()
    return stopping.run(resolve(compose(name, [*RECIPES[name][0], *words])), run_dir)[1]


def compared(records):
    """Those that do not measure the machine."""
    return {
        step: {key: value for key, value in own.items() if not key.endswith("environment_s")}
        for step, own in ((step, stopping.comparable(each)) for step, each in records.items())
    }


@pytest.mark.parametrize("name", RECIPES)
def test_a_pool_has_the_bits_of_processes_next_to_the_engine(name, tmp_path):
    _, next_to_it, in_pool = RECIPES[name]
    pooled = run(name, tmp_path / "pool", "pools.env={kind: env, members: 2, processes: 2}", *in_pool)
    assert compared(pooled) == compared(run(name, tmp_path / "next", *next_to_it))
    of_pool = {key.rsplit("/", 1)[1]: value for key, value in pooled[1].items() if key.startswith("perf/pool/env/")}
    assert of_pool.pop("busy_s") > 0
    assert of_pool == {"members": 2, "restarts": 0, "process_restarts": 0}


@pytest.mark.ray
@pytest.mark.matrix
def test_episodes_of_a_node_that_ends_continue_on_another_one():
    script = Path(__file__).with_name("pool_on_dying_node.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"observed": [3, 13, 23, 33], "restarts": 1}
