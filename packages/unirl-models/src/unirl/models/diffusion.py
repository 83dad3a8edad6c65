"""What sampling and replay of any adapter are made of, see `unirl.models.pipeline`.

Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from unirl.models.adapter import num_rows, select_rows
from unirl.sde import loop
from unirl.sde.loop import Trajectory, Velocity
from unirl.sde.solvers import DPMSolverPP2M, Solver, UniPCSolver
from unirl.sde.unfinished import Unfinished, Walk
from unirl.types.branching import Branching
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Modality
from unirl.types.precision import DTYPES
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment, SegmentStatus, UnfinishedSteps


@dataclass(frozen=True)
class ReplayedTransitions:
    """Stored transitions under the present weights; gradients flow to them through logp_R and mean."""

    logp_R: Tensor
    """[R] float32, nats per latent element, or summed, as the strategy's reduction says."""
    mean: Tensor
    """[R, ...] float32."""
    std_R: Tensor
    """[R] float32, without gradient."""
    q_R: Tensor | None
    """[R] float32 diffusion coefficient, without gradient; None for a kernel that has none."""
    gain_R: Tensor
    """[R] float32 derivative of the mean by the velocity, without gradient."""


Bind = Callable[[Conditions, DiffusionSamplingParams], Velocity]
"""What makes a velocity of conditions, one row per row of x; see `DiffusionAdapter.bind`."""


def in_forwards(bind: Bind, conditions: Conditions, params: DiffusionSamplingParams, size: int | None) -> Velocity:
    """What `bind` makes, under autocast, in forwards of at most `size` rows; None sets no limit.

    conditions: one row per row of x.
    """
    rows = num_rows(conditions)
    if size is None or rows <= size:
        parts = [(slice(0, rows), bind(conditions, params))]
    else:
        starts = range(0, rows, size)
        cuts = [slice(start, min(start + size, rows)) for start in starts]
        parts = [(cut, bind(select_rows(conditions, list(range(cut.start, cut.stop))), params)) for cut in cuts]
    is_mixed = params.autocast_precision != "fp32"
    dtype = DTYPES[params.autocast_precision] if is_mixed else None

    def run(x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        if x_R.shape[0] != rows:
            raise ContractError(f"{x_R.shape[0]} rows of latents for conditions of {rows} rows")
        with torch.autocast(x_R.device.type, dtype=dtype, enabled=is_mixed):
            outputs = [bound(x_R[cut], sigma_R[cut], step_R[cut]) for cut, bound in parts]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).float()

    return run


def stochastic_steps(params: DiffusionSamplingParams) -> list[int]:
    """The steps with noise. Raises ConfigError if a scheduler is still to choose them."""
    if params.sde_indices is None and params.scheduler is not None:
        raise ConfigError(
            "sampling.scheduler chooses the stochastic steps per rollout and has not been asked: "
            "pass params.resolved(rollout_id)"
        )
    return params.resolve_sde_indices(rollout_id=0)


def walked_together(
    velocity_of: Callable[[list[int]], Velocity], start_keys: Sequence[str], own_steps: Sequence[int], start: int
) -> Velocity:
    """The velocity of all samples, asked once for those of one start that have not come to their own step yet.

    They are at the same latent until then, so one row stands for them. velocity_of(rows): that of these samples.
    start: the step of the first call; the loop asks once for each that follows, so no step is read from the device.
    """

    steps = count(start)

    def run(x_B: Tensor, sigma_B: Tensor, step_B: Tensor) -> Tensor:
        step = next(steps)
        first = list(range(len(own_steps)))
        seen: dict[str, int] = {}
        for row, own in enumerate(own_steps):
            if own >= step:
                first[row] = seen.setdefault(start_keys[row], row)
        rows = sorted(set(first))
        found = velocity_of(rows)(x_B[rows], sigma_B[rows], step_B[rows])
        return found[[rows.index(row) for row in first]]

    return run


def check_sizes(
    conditions: Conditions,
    initial_latents: Tensor,
    sigmas: Tensor,
    noise_keys: Sequence[str],
    shape: tuple[int, ...],
    num_steps: int,
) -> None:
    """Raise ContractError unless the latents have the shape of one, [B, *shape], each has a row of the conditions and
    a noise key, and the schedule has a sigma more than steps."""
    num_samples = initial_latents.shape[0]
    if tuple(initial_latents.shape[1:]) != shape:
        raise ContractError(f"initial latents are {tuple(initial_latents.shape)}; this geometry needs [B, *{shape}]")
    if not num_rows(conditions) == len(noise_keys) == num_samples:
        raise ContractError(
            f"{num_samples} initial latents, {num_rows(conditions)} conditions and {len(noise_keys)} noise keys: "
            "one of each per sample"
        )
    if sigmas.numel() != num_steps + 1:
        raise ContractError(f"{sigmas.numel()} sigmas for num_inference_steps = {num_steps}: one more than steps")


def check_trees(branching: Branching, start_keys: Sequence[str] | None, num_samples: int) -> None:
    """Raise ContractError unless the samples are whole trees, each from one start."""
    size = branching.num_leaves
    trees = [] if start_keys is None else [set(start_keys[at : at + size]) for at in range(0, num_samples, size)]
    if not trees or num_samples % size or any(len(tree) > 1 for tree in trees):
        raise ContractError(
            f"{num_samples} samples from {len(set(start_keys or ()))} common starts are not whole trees of {size}, one "
            f"after the other (branch_factors = {list(branching.factors)}). Set engine.forward_batch_size to a "
            f"multiple of {size}"
        )


def solver_of(params: DiffusionSamplingParams) -> Solver | None:
    """Solver of the deterministic steps; None for Euler's, which the loop takes itself."""
    match params.post_solver:
        case "euler":
            return None
        case "dpmpp_2m":
            return DPMSolverPP2M()
        case "unipc":
            return UniPCSolver()


def common_start(
    velocity_of: Callable[[list[int]], Velocity],
    latents: Tensor,
    sigmas: Tensor,
    storage_dtype: torch.dtype,
    start_keys: Sequence[str],
    start: int,
    walk: Walk,
) -> tuple[Tensor, int]:
    """Latents [B, ...] at the last of `sigmas`, or where `walk` ends, walked to from `start` once for every distinct
    start; and that position. The same latents where nothing is shared, or nothing is left."""
    first_of = {key: row for row, key in reversed(list(enumerate(start_keys)))}
    if start >= sigmas.numel() - 1 or len(first_of) == len(start_keys) or walk.is_over:
        return latents, start
    rows = sorted(first_of.values())
    walked = loop.sample(
        velocity_of(rows),
        latents[rows],
        sigmas,
        storage_dtype=storage_dtype,
        keep="last",
        on_step=walk,
        start=start,
    )
    final = walk.latents if walk.is_over and walk.latents is not None else walked.final
    return final[[rows.index(first_of[key]) for key in start_keys]], walked.indices[-1]


def segment_of(
    trajectory: Trajectory, modality: Modality, sigmas: Tensor, own_steps: Sequence[int] | None
) -> LatentSegment:
    """The segment that stores a trajectory of B samples. own_steps: B of its stochastic steps; None: each has all."""
    return LatentSegment(
        modality=modality,
        latents=trajectory.latents,
        sigmas=sigmas.detach().to("cpu", torch.float32),
        indices=trajectory.indices,
        sde_indices=trajectory.sde_indices,
        sde_logp=trajectory.sde_logp,
        own_steps=None if own_steps is None else torch.tensor(list(own_steps), device=trajectory.latents.device),
    )


# Samples that were ended early --------------------------------------------------------------------------------------


def never() -> bool:
    """Nothing ends early."""
    return False


def unfinished_steps(begun: LatentSegment | None) -> Unfinished | None:
    """What samples of a segment go on from. Raises ContractError if they are not all at the same position, or some are
    finished."""
    if begun is None:
        return None
    positions = sorted(set(begun.reached.tolist()))
    if begun.unfinished is None or len(positions) != 1 or positions[0] >= begun.num_steps:
        raise ContractError(
            f"the samples to continue are at positions {positions} of {begun.num_steps}: pass those of one, unfinished"
        )
    return Unfinished(positions[0], begun.unfinished.state, begun.latents, begun.sde_logp)


def recalls(solver: Solver | None, left: Unfinished | None, sigmas: Tensor, sde_indices: Sequence[int]) -> bool:
    """True if the solver goes on from what an earlier walk left, which it then recalls."""
    observed = max(sde_indices, default=-1)
    if solver is None or left is None or left.reached <= max(observed, 0):
        return False
    solver.reset(sigmas.detach().to("cpu", torch.float32))
    solver.recall(left.state[:, 1:].unbind(1), left.reached, observed)
    return True


def ended_early(segment: LatentSegment, unfinished: Unfinished) -> LatentSegment:
    """The segment of samples that are all unfinished."""
    count, device = segment.batch_size, segment.latents.device
    reached = torch.full((count,), unfinished.reached, device=device)
    return segment.replace(
        status=torch.full((count,), SegmentStatus.ABORTED, device=device),
        unfinished=UnfinishedSteps(reached=reached, state=unfinished.state),
    )
