"""The one loop over a schedule, and the replay of the transitions it stored.

Sampling and replay go through the same function for a stochastic step, on the same inputs: the loop continues from the
latent as it is stored (rounded through `storage_dtype`), so a replay of the same rows in one batch in float32 on a CPU
gives the same log-probability bit for bit. Neither moves a model, chooses a precision for it, or turns gradients off:
call `sample` under `torch.no_grad()` unless gradients shall flow through the trajectory. Shape letters: see
`unirl.sde`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from unirl.sde.kernels import SDEStrategy, StepOut
from unirl.sde.rows import check_rows, check_same_shape, over_rows
from unirl.sde.solvers import Solver, euler_step

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""velocity(x [R, ...] float32, sigma_R [R] float32, step_R [R] int64) -> [R, ...]. Guidance belongs inside."""

Keep = Literal["transitions", "all", "last"]


@dataclass(frozen=True)
class Trajectory:
    """What sampling kept. K positions are stored out of the T + 1 of the schedule."""

    latents: Tensor
    """[B, K, ...] in the storage dtype."""
    indices: list[int]
    """K positions in 0 .. T, ascending; slot k of `latents` is the latent at sigmas[indices[k]]. Ends with T, or with
    the position where the walk was ended."""
    sde_indices: list[int]
    """S stochastic steps, ascending; step i leads from position i to i + 1."""
    sde_logp: Tensor | None
    """[B, S] float32; None without stochastic steps."""
    sde_means: Tensor | None
    """[B, S, ...] float32; the transition means, if they were asked for."""

    @property
    def final(self) -> Tensor:
        """[B, ...]; the latent at the end of the schedule."""
        return self.latents[:, -1]

    def at(self, positions: Sequence[int]) -> Tensor:
        """[B, len(positions), ...]; the latents at these positions. Raises ValueError naming those not stored."""
        missing = sorted(set(positions) - set(self.indices))
        if missing:
            raise ValueError(f"positions {missing} were not kept; stored are {self.indices}.")
        return self.latents[:, [self.indices.index(position) for position in positions]]

    def transitions(self) -> tuple[Tensor, Tensor]:
        """x and next of every stochastic step, [B, S, ...] each: `flatten(0, 1)` gives rows in `transition_rows`
        order."""
        return self.at(self.sde_indices), self.at([index + 1 for index in self.sde_indices])


@dataclass(frozen=True)
class Replay:
    """Stored transitions under the present velocity; gradients flow to it."""

    logp_R: Tensor
    """[R] float32."""
    mean: Tensor
    """[R, ...] float32."""
    std_R: Tensor
    """[R] float32; carries no gradient."""


def sample(
    velocity: Velocity,
    initial: Tensor,
    sigmas: Tensor,
    *,
    strategy: SDEStrategy | None = None,
    eta: float = 0.0,
    sde_indices: Sequence[int] = (),
    step_noise: Callable[[int], Tensor] | None = None,
    storage_dtype: torch.dtype = torch.float32,
    solver: Solver | None = None,
    keep: Keep = "transitions",
    keep_means: bool = False,
    on_step: Callable[[int, Tensor], bool | None] | None = None,
    start: int = 0,
    own_steps: Sequence[int] | None = None,
    solver_goes_on: bool = False,
) -> Trajectory:
    """Walks the schedule once from `initial` [B, ...] at sigmas[start] and returns what `keep` names.

    sigmas: [T + 1], strictly decreasing within [0, 1], on any device (read once; a GPU tensor costs one transfer).
    sde_indices: the stochastic steps, any order. They use `strategy` with `eta` > 0 and step_noise(i), [B, ...]; eta,
    strategy and step_noise have no effect when there are none. All other steps are Euler.
    solver: replaces Euler after the last stochastic step (everywhere, if there is none), as in MixGRPO-Flash, and goes
    on from what that step predicted; steps before a stochastic step stay Euler.
    storage_dtype: latents on both sides of a stochastic step are rounded through it before they are used; in between
    the state is float32 and only the stored copy is rounded. So the trajectory does not depend on `keep`.
    keep: "transitions" stores i and i + 1 of every stochastic step i, and T; "all" stores 0 .. T; "last" stores T.
    keep_means: also returns the means of the stochastic steps, float32.
    on_step: called with (i, latent at i + 1 in float32) after every step. Where it gives True, the walk ends there, and
        the trajectory is that of a schedule which ends at i + 1.
    start: position of `initial`; earlier steps were taken elsewhere, `sde_indices` names none of them.
    own_steps: B of the stochastic steps, the only one of each row; rows take Euler steps at the others, whose log-prob
        is NaN. None: every row has all of them.
    solver_goes_on: the solver took steps up to `start`, or recalls them; else it is reset.
    Raises ValueError for a bad schedule, index, keep or eta, for a missing strategy or step_noise, and for a solver
    that would never be used because the last step is stochastic.
    """
    levels = _checked_sigmas(sigmas)
    num_steps = len(levels) - 1
    sde_steps = _checked_sde_indices(sde_indices, num_steps, start)
    recorder = _Recorder(kept_positions(keep, sde_steps, num_steps, start), storage_dtype, keep_means)
    last_sde = sde_steps[-1] if sde_steps else -1
    _check_kernel(strategy, step_noise, eta, sde_steps, levels)
    own_B = _checked_own_steps(own_steps, sde_steps, initial, start)
    if keep_means and not sde_steps:
        raise ValueError("keep_means needs stochastic steps: sde_indices is empty.")
    if solver is not None and not solver_goes_on:
        _check_solver_steps(start, sde_steps, num_steps)
        solver.reset(torch.tensor(levels, dtype=torch.float32, device="cpu"))

    x = initial.float()
    end = num_steps
    for index in range(start, num_steps):
        if index in sde_steps:
            x = x.to(storage_dtype).float()
        recorder.record_latent(index, x)
        sigma_R, sigma_next_R, step_R = _rows(x, levels, index)
        if strategy is not None and step_noise is not None and index in sde_steps:
            predicted = velocity(x, sigma_R, step_R)
            if solver is not None and index == last_sde:
                solver.observe(x, predicted, index)
            out, logp_B = _stochastic_step(
                predicted,
                x,
                sigma_R,
                sigma_next_R,
                strategy=strategy,
                eta=eta,
                sigma_max=levels[1],
                noise=step_noise(index).to(x),
                storage_dtype=storage_dtype,
            )
            if own_B is None:
                x = out.next
            else:
                is_own_B = own_B == index
                x = torch.where(over_rows(is_own_B, x), out.next, euler_step(x, predicted, sigma_R, sigma_next_R))
                logp_B = torch.where(is_own_B, logp_B, torch.nan)
            recorder.record_step(logp_B, out.mean)
        elif solver is not None and index > last_sde:
            x = solver.step(x, velocity(x, sigma_R, step_R), index)
        else:
            x = euler_step(x, velocity(x, sigma_R, step_R), sigma_R, sigma_next_R)
        if on_step is not None and on_step(index, x):
            end = index + 1
            break
    return recorder.trajectory(end, x, sde_steps)


class _Recorder:
    """Collects what a walk stores, and makes the trajectory of it."""

    def __init__(self, positions: set[int], storage_dtype: torch.dtype, keep_means: bool) -> None:
        self._positions = positions
        self._dtype = storage_dtype
        self._keeps_means = keep_means
        self._latents: list[Tensor] = []
        self._logps: list[Tensor] = []
        self._means: list[Tensor] = []

    def record_latent(self, position: int, x: Tensor) -> None:
        """The walk is at a position before its end."""
        if position in self._positions:
            self._latents.append(x.to(self._dtype))

    def record_step(self, logp_B: Tensor, mean: Tensor) -> None:
        """The walk took a stochastic step."""
        self._logps.append(logp_B)
        if self._keeps_means:
            self._means.append(mean)

    def trajectory(self, end: int, x: Tensor, sde_steps: Sequence[int]) -> Trajectory:
        """The walk ended at position `end` with the latent x. sde_steps: those of the whole schedule."""
        return Trajectory(
            latents=torch.stack([*self._latents, x.to(self._dtype)], dim=1),
            indices=sorted({end, *(position for position in self._positions if position < end)}),
            sde_indices=[step for step in sde_steps if step < end],
            sde_logp=torch.stack(self._logps, dim=1) if self._logps else None,
            sde_means=torch.stack(self._means, dim=1) if self._means else None,
        )


def _check_kernel(
    strategy: SDEStrategy | None,
    step_noise: Callable[[int], Tensor] | None,
    eta: float,
    sde_steps: Sequence[int],
    levels: Sequence[float],
) -> None:
    """Raise ValueError unless the stochastic steps have a kernel with a log-probability for each of them."""
    if sde_steps and (strategy is None or step_noise is None or eta == 0):
        raise ValueError(
            f"stochastic steps {sde_steps} need a strategy, step_noise and eta > 0; got strategy = {strategy}, "
            f"step_noise = {step_noise}, eta = {eta}. Pass sde_indices=[] for a deterministic trajectory."
        )
    last_sde, last = sde_steps[-1] if sde_steps else -1, len(levels) - 2
    if strategy is not None and not strategy.takes_last_step and last_sde == last and levels[-1] == 0:
        raise ValueError(
            f"the {strategy.name} kernel adds no noise on the step to sigma = 0, which then has no log-probability. "
            f"Leave step {last_sde} out of the stochastic ones ({sde_steps})."
        )


def _check_solver_steps(start: int, sde_steps: Sequence[int], num_steps: int) -> None:
    last_sde = sde_steps[-1] if sde_steps else -1
    if start > last_sde + 1:
        raise ValueError(f"start = {start}: a solver needs every step after the last stochastic one ({last_sde}).")
    if last_sde == num_steps - 1:
        raise ValueError(
            f"a solver runs after the last stochastic step, but that is the last step of all (sde_indices = "
            f"{sde_steps}, {num_steps} steps). End the stochastic steps earlier, or pass no solver."
        )


def replay(
    velocity: Velocity,
    x_R: Tensor,
    next_R: Tensor,
    sigma_R: Tensor,
    sigma_next_R: Tensor,
    step_R: Tensor,
    *,
    strategy: SDEStrategy,
    eta: float,
    sigma_max: float,
) -> Replay:
    """The log-probability of stored transitions under the present velocity: one call for all rows.

    x_R, next_R: [R, ...] as stored, any float dtype. sigma_R, sigma_next_R: [R]; step_R: [R] int64, handed to velocity.
    Rows may mix samples and steps; split them outside to bound memory. eta, sigma_max: those of the rollout; sigma_max
    is its second sigma. Gradients flow to the velocity, not to the stored latents' next.
    Raises ValueError if shapes disagree, or if eta is 0, where there is no density.
    """
    check_same_shape(x_R, next_R=next_R)
    check_rows(x_R, sigma_R=sigma_R, sigma_next_R=sigma_next_R, step_R=step_R)
    x_R, sigma_R, sigma_next_R = x_R.float(), sigma_R.float(), sigma_next_R.float()
    out, logp_R = _stochastic_step(
        velocity(x_R, sigma_R, step_R),
        x_R,
        sigma_R,
        sigma_next_R,
        strategy=strategy,
        eta=eta,
        sigma_max=sigma_max,
        next_sample=next_R,
    )
    return Replay(logp_R=logp_R, mean=out.mean, std_R=out.std_R)


def transition_rows(num_samples: int, sde_indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Which sample and which step each row of a batched replay holds, [R] int64 each, on the CPU.

    R = num_samples len(sde_indices).
    Sample-major: all steps of sample 0, then those of sample 1; the order of `Trajectory.transitions()` flattened and
    of `sde_logp.flatten()`.
    """
    sample_R = torch.arange(num_samples, device="cpu").repeat_interleave(len(sde_indices))
    step_R = torch.tensor(list(sde_indices), dtype=torch.int64, device="cpu").repeat(num_samples)
    return sample_R, step_R


def _stochastic_step(
    velocity: Tensor,
    x: Tensor,
    sigma_R: Tensor,
    sigma_next_R: Tensor,
    *,
    strategy: SDEStrategy,
    eta: float,
    sigma_max: float,
    noise: Tensor | None = None,
    next_sample: Tensor | None = None,
    storage_dtype: torch.dtype | None = None,
) -> tuple[StepOut, Tensor]:
    """The step that sampling (noise) and replay (next_sample) share, and its log-probability [R]."""
    out = strategy.step(
        x,
        velocity,
        sigma_R,
        sigma_next_R,
        eta=eta,
        sigma_max=sigma_max,
        noise=noise,
        next_sample=next_sample,
        storage_dtype=storage_dtype,
    )
    if out.logp_R is None:
        raise ValueError(f"{strategy} gave no log-probability at eta = {eta}: a deterministic step has none.")
    return out, out.logp_R


def _rows(x: Tensor, levels: list[float], index: int) -> tuple[Tensor, Tensor, Tensor]:
    """sigma, next sigma and step of one step for every row of x, on its device."""
    rows = x.shape[:1]
    sigma_R = torch.full(rows, levels[index], dtype=torch.float32, device=x.device)
    sigma_next_R = torch.full(rows, levels[index + 1], dtype=torch.float32, device=x.device)
    return sigma_R, sigma_next_R, torch.full(rows, index, dtype=torch.int64, device=x.device)


def _checked_sigmas(sigmas: Tensor) -> list[float]:
    levels = sigmas.float().tolist() if sigmas.ndim == 1 else []
    is_valid = len(levels) >= 2 and 0 <= levels[-1] and levels[0] <= 1
    if not is_valid or not all(level > following for level, following in pairwise(levels)):
        raise ValueError(
            f"sigmas must be [T + 1] with T >= 1, strictly decreasing within [0, 1]; got shape {tuple(sigmas.shape)}, "
            f"values {sigmas.tolist()}."
        )
    return levels


def kept_positions(keep: Keep, sde_steps: Sequence[int], num_steps: int, start: int = 0) -> set[int]:
    """The positions among start .. T that `keep` stores; T is always one of them."""
    if keep not in get_args(Keep):
        raise ValueError(f"keep = {keep!r} is not one of {get_args(Keep)}.")
    if keep == "all":
        return set(range(start, num_steps + 1))
    ends = sde_steps if keep == "transitions" else []
    return {num_steps, *ends, *(step + 1 for step in ends)}


def _checked_own_steps(
    own_steps: Sequence[int] | None, sde_steps: list[int], initial: Tensor, start: int
) -> Tensor | None:
    if own_steps is None:
        return None
    if len(own_steps) != initial.shape[0] or not {step for step in own_steps if step >= start} <= set(sde_steps):
        raise ValueError(
            f"own_steps = {list(own_steps)} must be one of the stochastic steps {sde_steps} for each of "
            f"{initial.shape[0]} rows."
        )
    return torch.tensor(list(own_steps), device=initial.device)


def _checked_sde_indices(sde_indices: Sequence[int], num_steps: int, start: int) -> list[int]:
    steps = sorted(int(index) for index in sde_indices)
    if len(set(steps)) != len(steps) or any(not 0 <= index < num_steps for index in steps):
        raise ValueError(f"sde_indices = {list(sde_indices)} must be distinct and within 0 .. {num_steps - 1}.")
    if not 0 <= start < num_steps or any(step < start for step in steps):
        raise ValueError(f"start = {start} must lie in 0 .. {num_steps - 1} and before the stochastic steps {steps}.")
    return steps
