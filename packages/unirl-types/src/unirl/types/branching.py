"""A tree of denoising trajectories: samples of one prompt share their first steps and part at given ones.

Legend: N leaves of a tree, which are the samples of one prompt; D branch points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unirl.types.errors import ConfigError


@dataclass(frozen=True)
class Branching:
    """Where trajectories part. Leaves are numbered so that those below any node are consecutive."""

    steps: Sequence[int]
    """[D] denoising steps at which every node parts, ascending."""
    factors: Sequence[int]
    """[D] children of a node at each of them, at least 2."""

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.factors) or not self.steps:
            raise ConfigError(
                f"branch_steps = {list(self.steps)} and branch_factors = {list(self.factors)} must name the same "
                "number of branch points, one at least"
            )
        if list(self.steps) != sorted(set(self.steps)):
            raise ConfigError(f"branch_steps = {list(self.steps)} must be ascending, each step once")
        if min(self.factors) < 2:
            raise ConfigError(f"branch_factors = {list(self.factors)} must be at least 2 each")

    @cached_property
    def num_leaves(self) -> int:
        """N, the product of the factors."""
        return math.prod(self.factors)

    def depth(self, step: int) -> int:
        """How many branch points lie at or before `step`: 0 where all leaves still share it, D at a leaf's own."""
        return sum(branch <= step for branch in self.steps)

    def leaves_per_node(self, depth: int) -> int:
        """Consecutive leaves that share the steps of `depth` in 0 .. D."""
        return math.prod(self.factors[depth:])

    @property
    def stages(self) -> list[tuple[int, int]]:
        """(step, size) each: from `step` on, `size` consecutive leaves are one. Begins at step 0, ends with size 1."""
        starts = [] if self.steps[0] == 0 else [(0, self.num_leaves)]
        return [*starts, *((step, self.leaves_per_node(depth + 1)) for depth, step in enumerate(self.steps))]

    def num_edges(self, steps: Sequence[int]) -> int:
        """Different transitions of one tree at these steps, each counted once however many leaves are below it."""
        return sum(self.num_leaves // self.leaves_per_node(self.depth(step)) for step in steps)
