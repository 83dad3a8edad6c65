"""Episodes, of turns and of moves, have the numbers of one process on two Ray workers, and of these on two nodes; also
where a pool plays them whose only member dies."""

import pytest
import stopping
import test_actions
import test_turns

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve
from unirl.trainer.scaling import SCALE_FILE

pytestmark = [pytest.mark.ray, pytest.mark.matrix]
TURNS = [*test_turns.SMALL, "num_rollouts=2", "engine.forward_batch_size=32"]
RECIPES = {
    "worlds/tools/grpo": TURNS,
    "worlds/zoom/grpo": [*TURNS, "eval.pass_prompts=4"],
    **{
        name: [*test_actions.SMALL, *test_actions.SIZES[name], "engine.forward_batch_size=4"]
        for name in ("vla/tabletop_push", "vla/tabletop_push_tokens")
    },
}
KILLED = "worlds/tools/grpo"
POOLED = {
    KILLED: {"turns": {"pool": "env", "environment": {"tools": {"add": {"_target_": "killing.KillingAdder"}}}}},
    "vla/tabletop_push": {
        "engine": {"environment": {"_target_": test_actions.PROCESSES[0].partition("=")[2], "pool": "env"}}
    },
}
"""What lets environments of some recipes be played on the second node alone. The first call of this tool kills the
member, and a second one joins before the next rollout."""
EXACT = ("reward/", "/rollout/", "group/")
"""What the first rollout says of its samples: the weights are those of the checkpoint."""


def compared(records):
    return {
        step: {name: value for name, value in found.items() if not name.endswith("environment_s")}
        for step, found in records.items()
    }


def merged(recipe, changes):
    """A recipe with the values of a nested mapping."""
    own = {key: merged(recipe.get(key) or {}, value) for key, value in changes.items() if isinstance(value, dict)}
    return {**recipe, **changes, **own}


USUAL = ("worlds/tools/grpo", "vla/tabletop_push")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.nightly) for name in RECIPES]
)
def test_one_process_two_workers_and_two_nodes_give_the_same_numbers(name, tmp_path):
    register_resolvers()

    def recipe(num_nodes=None):
        found = resolve(compose(name, RECIPES[name]))
        if num_nodes == 2 and name in POOLED:
            found = merged(found, POOLED[name] | {"pools": {"env": {"kind": "env", "nodes": 1, "processes": 2}}})
        if num_nodes is not None:
            found |= {"runtime": "ray", "num_devices": 2}
            if num_nodes == 2 and name == KILLED:
                found["turns"]["environment"]["tools"]["add"]["marks"] = str(tmp_path / "nodes-2")
            found["cluster"]["num_nodes"] = num_nodes
        return found

    _, alone = stopping.run(recipe(), tmp_path / "alone")
    alone = compared({step: stopping.comparable(found) for step, found in alone.items()})
    workers, nodes = (compared(stopping.run_on_nodes(recipe(num), tmp_path / f"nodes-{num}")) for num in (1, 2))
    assert nodes == workers, "where devices are changes no bit"
    if name == KILLED:
        assert (tmp_path / "nodes-2" / "killed").exists() and not (tmp_path / "nodes-2" / SCALE_FILE).exists()
    assert workers.keys() == alone.keys()
    for metric, value in alone[1].items():
        # float32: products of fewer rows, and sums in another order.
        expected = value if any(part in metric for part in EXACT) else pytest.approx(value, rel=1e-4, abs=1e-5)
        assert workers[1][metric] == expected, metric
