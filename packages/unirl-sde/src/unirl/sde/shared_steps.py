"""Sampling where consecutive samples share their first steps: each shared step is taken once.

Shape letters: see `unirl.sde`.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from unirl.sde.kernels import SDEStrategy
from unirl.sde.loop import Keep, Trajectory, Velocity, sample
from unirl.sde.solvers import Solver


def sample_shared(
    velocity_of: Callable[[list[int]], Velocity],
    initial: Tensor,
    sigmas: Tensor,
    stages: Sequence[tuple[int, int]],
    *,
    strategy: SDEStrategy | None = None,
    eta: float = 0.0,
    sde_indices: Sequence[int] = (),
    step_noise: Callable[[int, list[int]], Tensor] | None = None,
    storage_dtype: torch.dtype = torch.float32,
    solver: Solver | None = None,
    keep: Keep = "transitions",
    keep_means: bool = False,
    own_steps: Sequence[int] | None = None,
    on_step: Callable[[int, Tensor], bool | None] | None = None,
    solver_goes_on: bool = False,
) -> Trajectory:
    """Trajectories of all B samples of `initial`, walked in stages; see `unirl.sde.loop.sample` for all else.

    stages: (position, size) each: from `position` on, `size` consecutive samples are one, which is walked as the first
        of them. Positions ascend, the first is that of `initial`; sizes divide B and the size before, and end with 1.
        Every stage but the first begins with a stochastic step, where those that it parts get their own noise.
    velocity_of(rows): the velocity of these samples. step_noise(i, rows): their noise at step i, [len(rows), ...].
    own_steps: as in `sample`, for one stage alone.
    on_step: as in `sample`, with the latents of the stage.
    Samples that share a step have the same stored latents, log-prob and mean there. One stage of size 1 is `sample`.
    Raises ValueError for stages that are not so.
    """
    num_samples, sde_steps = initial.shape[0], set(sde_indices)
    _check_stages(stages, num_samples, sde_steps)
    if own_steps is not None and len(stages) > 1:
        raise ValueError(f"stages {list(stages)} share stochastic steps, and own_steps gives each sample one.")
    ends = [*(start for start, _ in stages[1:]), sigmas.numel() - 1]
    parts: list[Trajectory] = []
    is_over = False

    def ended(index: int, latents: Tensor) -> bool:
        nonlocal is_over
        is_over = on_step is not None and bool(on_step(index, latents))
        return is_over

    x = initial[:: stages[0][1]]
    for (start, size), end in zip(stages, ends, strict=True):
        rows = list(range(0, num_samples, size))
        is_last = end == ends[-1]
        if parts:
            x = parts[-1].final.repeat_interleave(len(rows) // x.shape[0], dim=0)
        own = sorted(step for step in sde_steps if start <= step < end)
        parts.append(
            sample(
                velocity_of(rows),
                x,
                sigmas[: end + 1],
                start=start,
                strategy=strategy,
                eta=eta,
                sde_indices=own,
                step_noise=None if step_noise is None else lambda step, rows=rows: step_noise(step, rows),
                storage_dtype=storage_dtype,
                solver=solver if is_last else None,
                keep=keep,
                keep_means=keep_means and bool(own),
                own_steps=own_steps,
                on_step=ended,
                solver_goes_on=solver_goes_on and is_last,
            )
        )
        if is_over:
            break
    is_whole = len(parts) == 1 and parts[0].latents.shape[0] == num_samples
    return parts[0] if is_whole else _joined(parts, num_samples)


def _check_stages(stages: Sequence[tuple[int, int]], num_samples: int, sde_steps: set[int]) -> None:
    sizes = [num_samples, *(size for _, size in stages)]
    is_nested = sizes[-1] == 1 and all(size >= 1 and above % size == 0 for above, size in pairwise(sizes))
    if not stages or not is_nested:
        raise ValueError(
            f"stages {list(stages)}: sizes must divide the {num_samples} samples and the size before, and end with 1."
        )
    starts = [start for start, _ in stages]
    if starts != sorted(set(starts)) or not set(starts[1:]) <= sde_steps:
        raise ValueError(
            f"stages {list(stages)} must ascend, and all but the first begin with a stochastic step; those are "
            f"{sorted(sde_steps)}."
        )


def _joined(parts: Sequence[Trajectory], num_samples: int) -> Trajectory:
    """One trajectory of parts that follow each other; where one ends the next begins, and stores that position."""

    def each(value: Tensor) -> Tensor:
        return value.repeat_interleave(num_samples // value.shape[0], dim=0)

    stored = [*(part.latents[:, :-1] for part in parts[:-1]), parts[-1].latents]
    logps = [each(part.sde_logp) for part in parts if part.sde_logp is not None]
    means = [each(part.sde_means) for part in parts if part.sde_means is not None]
    return Trajectory(
        latents=torch.cat([each(latents) for latents in stored], dim=1),
        indices=[*(index for part in parts[:-1] for index in part.indices[:-1]), *parts[-1].indices],
        sde_indices=[step for part in parts for step in part.sde_indices],
        sde_logp=torch.cat(logps, dim=1) if logps else None,
        sde_means=torch.cat(means, dim=1) if means else None,
    )
