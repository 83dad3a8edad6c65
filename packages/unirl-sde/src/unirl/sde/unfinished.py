"""Trajectories that are ended early, and go on where they were, perhaps with another velocity.

A walk may end after every step. What it goes on from is the latent there in float32, and what the solver of the last
steps remembers; the noise of a step has its own key, so that it is the same whenever the step is taken. Shape letters:
see `unirl.sde`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.sde.loop import Keep, Trajectory, kept_positions
from unirl.sde.solvers import Solver


@dataclass(frozen=True)
class Unfinished:
    """B trajectories, all at one position."""

    reached: int
    """The position, which is the step that follows."""
    state: Tensor
    """[B, 1 + H, ...] float32; the latent there, and what the solver remembers, see `Solver.remembered`."""
    latents: Tensor
    """[B, K, ...]; what a finished trajectory keeps, 0 where it has not come to."""
    sde_logp: Tensor | None
    """[B, S] float32; as `latents`."""


class Walk:
    """Notes where a walk is, and ends it. Pass it as `on_step` of `sample` and `sample_shared`.

    begun: what an earlier walk left. is_ending: asked before the first and after every step.
    """

    def __init__(self, begun: Unfinished | None, is_ending: Callable[[], bool]) -> None:
        self._begun = begun
        self._is_ending = is_ending
        self.is_over = is_ending()
        """True if no further step shall be taken."""
        self.latents: Tensor | None = None
        """[R, ...] float32 after the last step, of the R rows that took it; None before the first."""

    def __call__(self, index: int, x: Tensor) -> bool:
        """`on_step`: True if the walk ends here."""
        self.latents, self.is_over = x, self._is_ending()
        return self.is_over

    def whole(
        self,
        walked: Trajectory | None,
        start: Tensor,
        position: int,
        *,
        keep: Keep,
        sde_indices: Sequence[int],
        num_steps: int,
        solver: Solver | None,
        storage_dtype: torch.dtype,
    ) -> tuple[Trajectory, Unfinished | None]:
        """The trajectory with what earlier walks left of it, 0 where it has not come to; and what it goes on from, None
        if it is finished.

        walked: what this walk kept; None: nothing, it is at `position` with the latents `start` [B, ...].
        sde_indices, num_steps: of the whole schedule.
        """
        if self._begun is None and walked is not None and walked.indices[-1] == num_steps:
            return walked, None
        steps, num_samples, shape = sorted(sde_indices), start.shape[0], start.shape[1:]
        places = sorted(kept_positions(keep, steps, num_steps))
        latents = start.new_zeros((num_samples, len(places), *shape), dtype=storage_dtype)
        logps = start.new_zeros((num_samples, len(steps)), dtype=torch.float32)
        if self._begun is not None:
            latents.copy_(self._begun.latents)
            if self._begun.sde_logp is not None:
                logps.copy_(self._begun.sde_logp)
        reached, x = position, start.float()
        if walked is not None:
            reached = walked.indices[-1]
            for slot, place in enumerate(walked.indices):
                if place in places:
                    latents[:, places.index(place)] = walked.latents[:, slot]
            for column, step in enumerate(walked.sde_indices):
                if walked.sde_logp is not None:
                    logps[:, steps.index(step)] = walked.sde_logp[:, column]
            if self.latents is not None:
                x = self.latents.repeat_interleave(num_samples // self.latents.shape[0], dim=0)
        kept = Trajectory(latents, places, steps, logps if steps else None, None)
        if reached == num_steps:
            return kept, None
        remembered = [] if solver is None else solver.remembered()
        missing = (0 if solver is None else solver.num_remembered) - len(remembered)
        state = torch.stack([x, *(own.float() for own in remembered), *[torch.zeros_like(x)] * missing], dim=1)
        return kept, Unfinished(reached, state, latents, kept.sde_logp)


def stages_from(stages: Sequence[tuple[int, int]], position: int) -> list[tuple[int, int]]:
    """The stages of `sample_shared` that are left for trajectories at `position`."""
    sizes = [size for start, size in stages if start <= position]
    return [(position, sizes[-1]), *(stage for stage in stages if stage[0] > position)]
