"""Trees of trajectories: who shares what, and parameters that describe no tree."""

import re
from typing import Any

import pytest

from unirl.types.branching import Branching
from unirl.types.errors import ConfigError
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams

TREE = Branching((1, 3), (3, 2))


def params(**changes: Any):
    options: dict[str, Any] = {
        "num_inference_steps": 6,
        "samples_per_prompt": 6,
        "init_same_noise": True,
        "sde_indices": [1, 2, 3, 4],
        "branch_steps": [1, 3],
        "branch_factors": [3, 2],
    }
    return DiffusionSamplingParams(**{**options, **changes})


def test_a_tree_of_three_by_two():
    assert TREE.num_leaves == 6
    assert [TREE.depth(step) for step in range(6)] == [0, 1, 1, 2, 2, 2]
    assert [TREE.leaves_per_node(depth) for depth in range(3)] == [6, 2, 1]
    assert TREE.stages == [(0, 6), (1, 2), (3, 1)]
    assert Branching((0, 3), (3, 2)).stages == [(0, 2), (3, 1)]
    assert TREE.num_edges([1, 2, 3, 4]) == 3 + 3 + 6 + 6
    assert TREE.num_edges(range(6)) == 1 + 3 + 3 + 6 + 6 + 6


def test_parameters_hold_their_tree_and_say_what_one_worker_makes():
    assert params().branching == TREE
    assert params().samples_made_together == 6
    assert DiffusionSamplingParams().branching is None
    assert (
        DiffusionSamplingParams().samples_made_together == ARSamplingParams(temperature=1.0).samples_made_together == 1
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_prompt": 8}, "samples_per_prompt = 8 must be 6, the product of branch_factors = [3, 2]"),
        ({"branch_factors": None}, "branch_steps = [1, 3] and branch_factors = [] must name the same number"),
        ({"branch_steps": []}, "branch_steps = [] and branch_factors = [3, 2] must name the same number"),
        ({"branch_steps": [3, 1]}, "branch_steps = [3, 1] must be ascending"),
        ({"branch_factors": [6, 1]}, "branch_factors = [6, 1] must be at least 2 each"),
        ({"branch_steps": [1, 3.0]}, "an item of branch_steps = 3.0 must be an integer"),
        ({"init_same_noise": False}, "Set init_same_noise: true"),
        ({"eta": 0.0}, "branch_steps = [1, 3] need noise to part by"),
        ({"branch_steps": [1, 6]}, "branch_steps [6] lie outside 0..5"),
        ({"sde_indices": [1, 2]}, "branch_steps [3] are not stochastic"),
        ({"sde_indices": [0, 1, 3]}, "stochastic steps [0] lie before the first of branch_steps = [1, 3]"),
    ],
)
def test_parameters_without_a_tree_are_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        params(**changes)


class Fixed:
    def indices(self, rollout_id: int) -> list[int]:
        return [rollout_id, rollout_id + 2]


def test_steps_that_a_scheduler_chooses_must_hold_the_branch_points():
    scheduled = params(sde_indices=None, scheduler=Fixed())
    assert scheduled.resolve_sde_indices(1) == [1, 3]
    with pytest.raises(ConfigError, match=r"branch_steps \[1, 3\] are not stochastic"):
        scheduled.resolve_sde_indices(2)
    with pytest.raises(ConfigError, match=r"stochastic steps \[0\] lie before"):
        params(sde_indices=None).resolve_sde_indices(0)
