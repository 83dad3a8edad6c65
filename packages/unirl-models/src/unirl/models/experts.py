"""A velocity of several experts, each for its own noise levels. Shape letters: see `unirl.models`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unirl.sde.loop import Velocity

Expert = Callable[[list[int], Tensor, Tensor, Tensor], Tensor]
"""expert(rows, x, sigma, step) -> velocities of some rows; `rows` are their places among all, to select conditions."""
AnyRank = Callable[[bool], bool]
"""Returns True if its argument is true on any rank that shares the model's shards (`ShardedPolicyStore.any_rank`)."""


class RankFollowing:
    """What the bundle of several experts adds to its base. Implements unirl.types.protocols.models.RoutesRows.

    any_rank: what its velocity gives to `routed`; None until a backend has spread the experts over ranks.
    """

    any_rank: AnyRank | None = None

    def follow_ranks(self, any_rank: AnyRank) -> None:
        """From now on run the experts that any rank needs."""
        self.any_rank = any_rank


def routed(
    experts: Sequence[Expert], expert_of: Callable[[Tensor], Tensor], any_rank: AnyRank | None = None
) -> Velocity:
    """The velocity whose rows go to the expert of their noise level, one forward per expert that has rows.

    expert_of: numbers int64 [R] in 0..E-1 of noise levels sigma_R.
    any_rank: None where the weights lie whole on this rank. Where they are sharded, every rank runs the experts that
        any of them needs: one without its own rows runs the first row and adds nothing of it, so that gathering the
        shards and summing their gradients meets its like on every rank. A collective per expert and call.
    """

    def velocity(x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        numbers = expert_of(sigma_R).tolist()
        out = torch.zeros_like(x_R, dtype=torch.float32)
        for_others = 0.0
        for number, expert in enumerate(experts):
            rows = [row for row, own in enumerate(numbers) if own == number]
            # Before anything runs: a rank with rows would gather shards while one without them still waits to be asked.
            is_needed = bool(rows) if any_rank is None else any_rank(bool(rows))
            if len(rows) == len(numbers):  # while sampling, all rows have one noise level
                out = expert(rows, x_R, sigma_R, step_R).float()
            elif rows:
                index = torch.tensor(rows, device=x_R.device)
                part = expert(rows, x_R[index], sigma_R[index], step_R[index])
                out = out.index_copy(0, index, part.float())
            elif is_needed:
                for_others = for_others + 0.0 * expert([0], x_R[:1], sigma_R[:1], step_R[:1]).float().sum()
        return out + for_others if isinstance(for_others, Tensor) else out

    return velocity
