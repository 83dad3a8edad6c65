"""Deterministic steps along the probability-flow ODE dx/dsigma = v: Euler, DPM-Solver++(2M) and UniPC.

A solver is reset with a schedule and then called once per step in order. It keeps state, so one instance serves one
trajectory at a time. Shape letters: see `unirl.sde`.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from unirl.sde.rows import check_rows, check_same_shape, over_rows


class Solver(Protocol):
    """A deterministic sampler: `reset` with the T + 1 sigmas, then `step` for index 0 .. T - 1 in order."""

    num_remembered: ClassVar[int]
    """H, latents that it remembers of earlier steps at most."""

    def reset(self, sigmas: Tensor) -> None:
        """Forgets the previous trajectory and takes the schedule of the next one, [T + 1], decreasing."""
        ...

    def step(self, x: Tensor, velocity: Tensor, index: int) -> Tensor:
        """The latent at position index + 1, given the latent and the velocity at position index, [B, ...]."""
        ...

    def observe(self, x: Tensor, velocity: Tensor, index: int) -> None:
        """Record latent and velocity at a stochastic step, which the kernel takes."""
        ...

    def remembered(self) -> list[Tensor]:
        """What the next step needs of earlier ones, H latents [B, ...] at most."""
        ...

    def recall(self, latents: Sequence[Tensor], index: int, observed: int) -> None:
        """After `reset`, go on with step `index` from what another one remembered, H latents of which the last may mean
        nothing. observed: the step that was observed; -1 where none was."""
        ...


def euler_step(x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor) -> Tensor:
    """x + v (sigma_next - sigma), [R, ...], computed in float32. Raises ValueError if shapes disagree."""
    check_rows(x, sigma_R=sigma_R, sigma_next_R=sigma_next_R)
    check_same_shape(x, velocity=velocity)
    dt = over_rows(sigma_next_R.float() - sigma_R.float(), x)
    return x.float() + velocity.float() * dt


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 when it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _step_sigmas(sigmas: list[float], index: int) -> tuple[float, float]:
    if not sigmas:
        raise ValueError("step was called before reset(sigmas): the solver has no schedule.")
    if not 0 <= index < len(sigmas) - 1:
        raise ValueError(
            f"step index = {index} is outside 0 .. {len(sigmas) - 2} of a {len(sigmas) - 1}-step schedule."
        )
    return sigmas[index], sigmas[index + 1]


class EulerSolver:
    """First-order steps, x + v dt; the same numbers as the loop without a solver."""

    num_remembered: ClassVar[int] = 0

    def __init__(self) -> None:
        self._sigmas: list[float] = []

    def reset(self, sigmas: Tensor) -> None:
        """Takes the schedule, [T + 1] float32."""
        self._sigmas = sigmas.tolist()

    def step(self, x: Tensor, velocity: Tensor, index: int) -> Tensor:
        """One Euler step from position `index`, [B, ...] float32. Raises ValueError outside the schedule."""
        sigma, sigma_next = _step_sigmas(self._sigmas, index)
        return euler_step(x, velocity, _filled(x, sigma), _filled(x, sigma_next))

    def observe(self, x: Tensor, velocity: Tensor, index: int) -> None:
        """Nothing: a step of first order looks at no other."""

    def remembered(self) -> list[Tensor]:
        """Nothing, as `observe`."""
        return []

    def recall(self, latents: Sequence[Tensor], index: int, observed: int) -> None:
        """Nothing, as `observe`."""


def _filled(x: Tensor, value: float) -> Tensor:
    return torch.full((x.shape[0],), value, dtype=torch.float32, device=x.device)


class DPMSolverPP2M:
    """DPM-Solver++(2M): a second-order multistep in the predicted clean latent x0 = x - sigma v.

    With alpha = 1 - sigma and lambda = ln(alpha / sigma), h = lambda_next - lambda:
        x_next = (sigma_next / sigma) x + (1 - sigma_next / sigma) D,
        D = x0 + h / (2 h_previous) (x0 - x0_previous).
    First order (which is exactly Euler) on the first step after `reset`, on the last step of the schedule, and on a
    step whose predecessor was neither taken nor observed. Coefficients are float64; latents are float32 (float64 stays
    float64).
    From sigma = 1 the previous h is infinite, so step 1 of a full schedule is first order as well.
    Source: DPM-Solver++ (arXiv 2211.01095), algorithm 2, with the flow-matching alpha and sigma.
    """

    num_remembered: ClassVar[int] = 1

    def __init__(self) -> None:
        self._sigmas: list[float] = []
        self._previous: tuple[int, Tensor] | None = None

    def reset(self, sigmas: Tensor) -> None:
        """Takes the schedule, [T + 1], and forgets the previous prediction."""
        self._sigmas = sigmas.tolist()
        self._previous = None

    def step(self, x: Tensor, velocity: Tensor, index: int) -> Tensor:
        """One step from position `index`, [B, ...]. Raises ValueError outside the schedule or if shapes disagree."""
        check_same_shape(x, velocity=velocity)
        sigma, sigma_next = _step_sigmas(self._sigmas, index)
        x, velocity = at_least_float32(x), at_least_float32(velocity)
        x0 = x - sigma * velocity
        is_last = index == len(self._sigmas) - 2
        previous, self._previous = self._previous, (index, x0)
        if is_last or previous is None or previous[0] != index - 1:
            return x + velocity * (sigma_next - sigma)
        h = _log_snr(sigma_next) - _log_snr(sigma)
        h_previous = _log_snr(sigma) - _log_snr(self._sigmas[index - 1])
        extrapolated = x0 + (h / (2 * h_previous)) * (x0 - previous[1])
        return (sigma_next / sigma) * x + (1 - sigma_next / sigma) * extrapolated

    def observe(self, x: Tensor, velocity: Tensor, index: int) -> None:
        """Keeps the predicted clean latent for the next step. MixGRPO-Flash starts after its window this way."""
        x0 = at_least_float32(x) - self._sigmas[index] * at_least_float32(velocity)
        self._previous = (index, x0)

    def remembered(self) -> list[Tensor]:
        """The last predicted clean latent."""
        return [] if self._previous is None else [self._previous[1]]

    def recall(self, latents: Sequence[Tensor], index: int, observed: int) -> None:
        """Takes the prediction that another one remembered, where step `index` looks at one."""
        self._previous = (index - 1, latents[0]) if index > max(observed, 0) else None


class UniPCSolver:
    """UniPC of second order: a predicted step, corrected by the prediction that the model makes at its end.

    With x0 = x - sigma v, lambda = ln(alpha / sigma), h = lambda_next - lambda, w = 1 - sigma_next / sigma,
    r = (lambda_previous - lambda) / h and D = (x0_previous - x0) / r:
        predicted x_next = (sigma_next / sigma) x + w (x0 + D / 2)
        corrected x_next = (sigma_next / sigma) x + w (x0 + a D + b (x0_next - x0)),
    a and b by `_corrector_weights`. The correction costs no forward: x0_next is what the model predicts at the
    predicted x_next, for the step that follows. First order (the predicted step is Euler) on the first step after
    `reset`, on the last step of the schedule, and on a step whose predecessor was neither taken nor observed; a step
    that was observed is not corrected. Coefficients are float64; latents are float32 (float64 stays float64).
    Equal to diffusers' UniPCMultistepScheduler with flow sigmas, solver_order 2, "bh2" and predict_x0, Wan's settings.
    Source: UniPC (arXiv 2302.04867), B(h) = e^h - 1, with the flow-matching alpha and sigma.
    """

    num_remembered: ClassVar[int] = 3

    def __init__(self) -> None:
        self._sigmas: list[float] = []
        self._predictions: list[tuple[int, Tensor]] = []
        self._step: tuple[Tensor, int] | None = None

    def reset(self, sigmas: Tensor) -> None:
        """Takes the schedule, [T + 1], and forgets the previous steps."""
        self._sigmas = sigmas.tolist()
        self._predictions = []
        self._step = None

    def step(self, x: Tensor, velocity: Tensor, index: int) -> Tensor:
        """One step from position `index`, [B, ...]. Raises ValueError outside the schedule or if shapes disagree."""
        check_same_shape(x, velocity=velocity)
        sigma, sigma_next = _step_sigmas(self._sigmas, index)
        x, velocity = at_least_float32(x), at_least_float32(velocity)
        x0 = x - sigma * velocity
        if not self._predictions or self._predictions[-1][0] != index - 1:
            self._predictions, self._step = [], None
        if self._step is not None:
            x = self._corrected(x0, index)
        is_last = index == len(self._sigmas) - 2
        order = 1 if is_last or not self._predictions else 2
        direction = x0
        if order == 2:
            _, previous = self._predictions[-1]
            direction = x0 + (previous - x0) / (2 * self._ratio(index - 1, index, index + 1))
        self._predictions = [*self._predictions[-1:], (index, x0)]
        self._step = (x, order)
        return (sigma_next / sigma) * x + (1 - sigma_next / sigma) * direction

    def observe(self, x: Tensor, velocity: Tensor, index: int) -> None:
        """Keeps the predicted clean latent for the next step."""
        x0 = at_least_float32(x) - self._sigmas[index] * at_least_float32(velocity)
        self._predictions, self._step = [(index, x0)], None

    def remembered(self) -> list[Tensor]:
        """The last predicted clean latents, newest first, and where the last step began, if it is to be corrected."""
        own = [x0 for _, x0 in reversed(self._predictions)]
        return own if self._step is None else [*own, self._step[0]]

    def recall(self, latents: Sequence[Tensor], index: int, observed: int) -> None:
        """Takes the predictions and the step that another one remembered, as `remembered` gives them."""
        first = max(observed, 0)
        count = min(2, max(0, index - first))
        self._predictions = [(index - 1 - back, latents[back]) for back in reversed(range(count))]
        was_observed = index - 1 == observed
        self._step = None if not count or was_observed else (latents[count], 1 if index - 1 == first else 2)

    def _corrected(self, x0: Tensor, index: int) -> Tensor:
        """The latent at position `index` by the step that led there and the prediction that the model makes there."""
        if self._step is None:
            raise ValueError("no step was taken that could be corrected.")
        start, order = self._step
        _, before = self._predictions[-1]
        direction = before + (x0 - before) / 2
        if order == 2:
            ratio = self._ratio(index - 2, index - 1, index)
            a, b = _corrector_weights(self._log_snr(index) - self._log_snr(index - 1), ratio)
            direction = before + (a / ratio) * (self._predictions[-2][1] - before) + b * (x0 - before)
        shrink = self._sigmas[index] / self._sigmas[index - 1]
        return shrink * start + (1 - shrink) * direction

    def _ratio(self, before: int, at: int, after: int) -> float:
        """r of the step from `at` to `after`; negative."""
        start = self._log_snr(at)
        return (self._log_snr(before) - start) / (self._log_snr(after) - start)

    def _log_snr(self, index: int) -> float:
        return _log_snr(min(self._sigmas[index], _NEARLY_ONE))


# What diffusers puts instead of sigma = 1, whose log-SNR is infinite, rounded to float32 as it does.
_NEARLY_ONE = torch.tensor(1 - 1e-6, dtype=torch.float32, device="cpu").item()


def _corrector_weights(h: float, ratio: float) -> tuple[float, float]:
    """a and b of `UniPCSolver`: the two order conditions of the paper's UniC-2, at -h because x0 is predicted."""
    growth = math.expm1(-h)
    first = growth / -h - 1
    second = 2 * (first / -h - 0.5)
    a = (first - second) / growth / (1 - ratio)
    return a, first / growth - a


def _log_snr(sigma: float) -> float:
    """lambda = ln((1 - sigma) / sigma), minus infinity at sigma = 1."""
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf
