"""BranchGRPO: the samples of a prompt are the leaves of a tree, and every edge is trained once with its own credit.

An edge is one stochastic step of one node: it is shared by the leaves below it. What it is worth follows from them.
Legend: B samples, U = B / N trees of N leaves, D branch points, R rows, one an edge.
Sources: BranchGRPO (arXiv 2509.06040), the tree-based advantages and the objective over edges; TreeGRPO (arXiv
2512.08153), leaf advantages handed down the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unirl.algorithms.base import MicroBatch
from unirl.algorithms.branch_rules import SHARED_STEPS_ARE_WEIGHED_ALONE
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.branching import Branching
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutTrack
from unirl.types.segments import LatentSegment

EdgeScale = Literal["depth", "leaves"]
EPS = 1e-8
"""Added to the standard deviation of a depth, whose values are in standard deviations of the leaves."""


@bounded("algorithm")
class BranchGRPO(DiffusionGRPO):
    """The clipped objective on the edges of trees (`sampling.branch_steps`), with the mean over edges.

    samples_per_tree: N, the samples of a prompt, which a micro-batch holds together.
    edge_scale: what an edge's advantage is, see `edge_advantages`.
    Everything else: see `DiffusionGRPO`; every stochastic step trains, so step_fraction must be 1.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.branch_rules"
    trains_trees: ClassVar[bool] = True
    trains_own_steps: ClassVar[bool] = False
    unit_option: ClassVar[str | None] = "samples_per_tree"

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        samples_per_tree: PositiveInt,
        edge_scale: EdgeScale = "depth",
        **options: Any,  # Any: the keywords of DiffusionGRPO
    ) -> None:
        self.samples_per_unit = samples_per_tree
        super().__init__(pipeline, policies, **options)
        if self.step_fraction != 1:
            raise ConfigError(
                f"algorithm.step_fraction = {self.step_fraction}: samples that share a step cannot draw it each for "
                "themselves. Set it to 1, and make fewer steps stochastic."
            )
        if self.rollout_correction is not None and self.rollout_correction.level != "token":
            raise ConfigError(f"algorithm.rollout_correction.{SHARED_STEPS_ARE_WEIGHED_ALONE}")
        self.edge_scale: EdgeScale = edge_scale

    def num_terms(self, track: RolloutTrack) -> int:
        """Edges of all trees."""
        steps = self._stochastic_steps(track)
        return track.batch_size // self.samples_per_unit * self._branching(track).num_edges(steps)

    def rows(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """sample_R and step_R of every edge, tree by tree; the sample is the first leaf below it."""
        first, steps = edges(self._branching(micro.track), micro.segment.sde_indices)
        roots = torch.arange(0, micro.segment.batch_size, self.samples_per_unit)
        return (roots[:, None] + first).flatten(), steps.repeat(len(roots))

    def row_advantages(self, micro: MicroBatch, sample_R: Tensor, step_R: Tensor) -> Tensor:
        """Advantage of every edge [R], see `edge_advantages`."""
        branching = self._branching(micro.track)
        advantage_BD = edge_advantages(micro.advantages, branching, scale=self.edge_scale)
        depth_R = torch.tensor([branching.depth(step) - 1 for step in step_R.tolist()])
        return advantage_BD[sample_R, depth_R]

    def _branching(self, track: RolloutTrack) -> Branching:
        """The shape of the trees. Raises ContractError if the samples of the track are no such trees."""
        segment, size = track.segment, self.samples_per_unit
        params = segment.params if isinstance(segment, LatentSegment) else None
        branching = None if params is None else params.branching
        if branching is None or branching.num_leaves != size:
            raise ContractError(
                f"{type(self).__name__} trains on trees of {size} samples, these share steps as {branching} says. Set "
                "sampling.branch_steps and branch_factors."
            )
        groups = track.group_ids
        for start in range(0, len(groups), size):
            if len(set(groups[start : start + size])) > 1 or len(groups) % size:
                raise ContractError(
                    f"samples {start} to {start + size - 1} are no tree of {size} leaves of one prompt; their groups "
                    f"are {groups[start : start + size]}. Set selection.best_of: null."
                )
        return branching


def edges(branching: Branching, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """First leaf and step of every edge of one tree at these stochastic steps, int64 each, leaf by leaf."""
    found = [
        (leaf, step)
        for leaf in range(branching.num_leaves)
        for step in steps
        if leaf % branching.leaves_per_node(branching.depth(step)) == 0
    ]
    leaves, of_steps = zip(*found, strict=True)
    return torch.tensor(leaves), torch.tensor(of_steps)


def edge_advantages(leaf_B: Tensor, branching: Branching, *, scale: EdgeScale) -> Tensor:
    """Advantage of the edge that each leaf goes through at each depth, float32 [B, D].

    leaf_B: advantages of the leaves, float32 [B], whole trees one after the other.
    An edge at depth d is worth V, the mean over the leaves below it: every leaf is as probable as another, because each
    was drawn from the policy. "depth" (BranchGRPO) scales V over the nodes of its tree at its depth, (V - mean V) /
    (std V + EPS), with the population's standard deviation; "leaves" (TreeGRPO) takes V as it is.
    Where all nodes of a depth are worth the same, their advantages are 0 by "depth".
    """
    leaf_UN = leaf_B.double().unflatten(0, (-1, branching.num_leaves))
    columns = []
    for depth in range(1, len(branching.steps) + 1):
        below = branching.leaves_per_node(depth)
        value_UM = leaf_UN.unflatten(1, (-1, below)).mean(dim=2)
        if scale == "depth":
            centred = value_UM - value_UM.mean(dim=1, keepdim=True)
            value_UM = centred / (value_UM.std(dim=1, correction=0, keepdim=True) + EPS)
        columns.append(value_UM.repeat_interleave(below, dim=1))
    return torch.stack(columns, dim=2).flatten(0, 1).float()
