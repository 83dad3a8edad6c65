"""One stochastic step of a flow-matching sampler, as a Gaussian transition with an exact log-probability.

With dt = sigma_next - sigma < 0 and the predicted noise eps_hat = x + (1 - sigma) v, the SDE kernels are
    mean = x + v dt + (q^2 / (2 sigma)) eps_hat dt        std = q sqrt(-dt)
and differ only in the diffusion coefficient q; eta = 0 is the Euler step of the ODE. CPS and DDIM keep the marginal
exactly for any step length instead: with x0 = x - sigma v, mean = (1 - sigma_next) x0 + sqrt(sigma_next^2 - std^2)
eps_hat. Arithmetic is float32 whatever comes in. Every row carries its own sigma, because a batched replay mixes steps;
`sigma_max` is the second sigma of the active schedule. Shape letters: see `unirl.sde`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from unirl.sde.likelihood import Reduction, check_reduction, gaussian_log_prob, reduce_elements
from unirl.sde.rows import check_rows, check_same_shape, over_rows
from unirl.sde.solvers import euler_step

# A schedule that went through another dtype may start at 0.9999999 instead of 1, where q would explode.
SIGMA_ONE = 1 - 1e-6


@dataclass(frozen=True)
class Transition:
    """The distribution of the next latent: a Gaussian with one standard deviation per row."""

    mean: Tensor
    """[R, ...] float32; carries the gradient of the velocity."""
    std_R: Tensor
    """[R] float32; the standard deviation, sqrt(-dt) included."""
    q_R: Tensor | None
    """[R] float32; the diffusion coefficient, std / sqrt(-dt). None for CPS, which has none."""


@dataclass(frozen=True)
class StepOut:
    """One step taken (`noise` given) or evaluated (`next_sample` given)."""

    next: Tensor
    """[R, ...] float32; the next latent, rounded through the storage dtype when sampling."""
    mean: Tensor
    """[R, ...] float32."""
    std_R: Tensor
    """[R] float32; 0 when eta is 0."""
    logp_R: Tensor | None
    """[R] float32; None when eta is 0, where there is no density."""


class SDEStrategy(ABC):
    """What the kernels share: the step around `transition` and `log_prob`.

    reduction: "mean" or "sum" of the log-probability over the N latent elements; see `unirl.sde.likelihood`.
    """

    name: ClassVar[str]
    is_gaussian: ClassVar[bool] = True
    """False when `log_prob` is not the logarithm of the transition density."""
    max_eta: ClassVar[float | None] = None
    """Largest eta; None: any. `check_eta` enforces it."""
    takes_last_step: ClassVar[bool] = True
    """False when the step to sigma = 0 has no noise, and so no log-probability: keep it out of the stochastic steps."""
    asks_for_clean: ClassVar[bool] = False
    """True when a model of average velocities is asked for the one to sigma = 0, whose step ends on the clean latent;
    False: for the velocity at the step's own level."""

    def __init__(self, reduction: Reduction = "mean") -> None:
        check_reduction(reduction)
        self.reduction: Reduction = reduction

    def __repr__(self) -> str:
        return f"{type(self).__name__}(reduction={self.reduction!r})"

    @abstractmethod
    def transition(
        self, x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, *, eta: float, sigma_max: float
    ) -> Transition:
        """The distribution of the next latent given x [R, ...], its velocity [R, ...] and both sigmas [R]."""

    def log_prob(self, y: Tensor, transition: Transition) -> Tensor:
        """log p(y | transition), [R] float32. y [R, ...] is detached. Undefined where std is 0."""
        return gaussian_log_prob(y, transition.mean, transition.std_R, self.reduction)

    def step(
        self,
        x: Tensor,
        velocity: Tensor,
        sigma_R: Tensor,
        sigma_next_R: Tensor,
        *,
        eta: float,
        sigma_max: float,
        noise: Tensor | None = None,
        next_sample: Tensor | None = None,
        storage_dtype: torch.dtype | None = None,
    ) -> StepOut:
        """Samples the next latent from `noise`, or evaluates the given `next_sample`; pass exactly one of them.

        x, velocity, noise, next_sample: [R, ...], any float dtype. sigma_R, sigma_next_R: [R], sigma > sigma_next >= 0.
        eta: the noise level, >= 0 (at most `max_eta`). At 0 the step is Euler, the log-probability is None, and neither
        noise nor next_sample is needed.
        sigma_max: the second sigma of the schedule, which replaces sigma = 1 where 1 - sigma divides.
        storage_dtype: sampling rounds the next latent through it before the log-probability is taken, so that the
        number belongs to what will be stored; None keeps float32.
        Raises ValueError for a bad eta or sigma_max, disagreeing shapes, or both or none of noise and next_sample.
        """
        self.check_eta(eta)
        if noise is not None and next_sample is not None:
            raise ValueError("step got both noise and next_sample: pass noise to sample, or next_sample to evaluate.")
        for name, given in (("noise", noise), ("next_sample", next_sample)):
            if given is not None:
                check_same_shape(x, **{name: given})
        if eta == 0:
            mean = euler_step(x, velocity, sigma_R, sigma_next_R)
            following = _rounded(mean, storage_dtype) if next_sample is None else next_sample.float()
            return StepOut(next=following, mean=mean, std_R=torch.zeros_like(sigma_R.float()), logp_R=None)
        transition = self.transition(x, velocity, sigma_R, sigma_next_R, eta=eta, sigma_max=sigma_max)
        if next_sample is not None:
            following = next_sample.float()
        elif noise is not None:
            drawn = transition.mean + over_rows(transition.std_R, x) * noise.float()
            following = _rounded(drawn, storage_dtype)
        else:
            raise ValueError(f"step got neither noise nor next_sample, and eta = {eta} is not 0.")
        logp_R = self.log_prob(following, transition)
        return StepOut(next=following, mean=transition.mean, std_R=transition.std_R, logp_R=logp_R)

    def step_std(self, sigmas: Tensor, steps: Sequence[int], *, eta: float) -> Tensor:
        """Standard deviation of the transition of these steps of a schedule, [S] float32 on the CPU.

        sigmas: [T + 1], the whole schedule. steps: S of its T steps.
        """
        sigmas = sigmas.detach().to("cpu", torch.float32)
        at_S = torch.tensor(list(steps), dtype=torch.int64)
        nothing = torch.zeros(len(steps), 1)  # the deviation depends on sigmas alone; one zero stands for each latent
        moved = self.transition(nothing, nothing, sigmas[at_S], sigmas[at_S + 1], eta=eta, sigma_max=float(sigmas[1]))
        return moved.std_R

    def step_gain(self, sigmas: Tensor, steps: Sequence[int], *, eta: float) -> Tensor:
        """Derivative of the mean by the velocity at these steps of a schedule, [S] float32 on the CPU; below 0.

        The mean is linear in the velocity, so this is the mean at x = 0, v = 1. Arguments: see `step_std`.
        """
        sigmas = sigmas.detach().to("cpu", torch.float32)
        at_S = torch.tensor(list(steps), dtype=torch.int64)
        x, velocity = torch.zeros(len(steps), 1), torch.ones(len(steps), 1)
        moved = self.transition(x, velocity, sigmas[at_S], sigmas[at_S + 1], eta=eta, sigma_max=float(sigmas[1]))
        return moved.mean[:, 0]

    def check_eta(self, eta: float) -> None:
        """Raises ValueError unless eta is a noise level that this kernel can use."""
        if not (math.isfinite(eta) and eta >= 0):
            raise ValueError(f"eta = {eta} of the {self.name} kernel must be finite and at least 0.")
        if self.max_eta is not None and eta > self.max_eta:
            raise ValueError(f"eta = {eta} of the {self.name} kernel must lie in [0, {self.max_eta:g}].")

    def _check(
        self, x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, eta: float, sigma_max: float
    ) -> None:
        self.check_eta(eta)
        if not 0 <= sigma_max < SIGMA_ONE:
            raise ValueError(f"sigma_max = {sigma_max} must lie in [0, 1): it is the second sigma of the schedule.")
        check_rows(x, sigma_R=sigma_R, sigma_next_R=sigma_next_R)
        check_same_shape(x, velocity=velocity)

    def _sde_transition(
        self, x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, q_R: Tensor
    ) -> Transition:
        dt_R = sigma_next_R - sigma_R
        drift_R = q_R.square() / (2 * sigma_R)
        x_weight_R = 1 + drift_R * dt_R
        v_weight_R = dt_R * (1 + drift_R * (1 - sigma_R))
        mean = over_rows(x_weight_R, x) * x.float() + over_rows(v_weight_R, x) * velocity.float()
        return Transition(mean=mean, std_R=q_R * (-dt_R).sqrt(), q_R=q_R)


def _marginal_mean(x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, kept_R: Tensor) -> Tensor:
    """(1 - sigma_next) x0 + kept eps_hat: the mean of a step that keeps `kept` of the predicted noise."""
    x, velocity = x.float(), velocity.float()
    x0 = x - over_rows(sigma_R, x) * velocity
    noise = x + over_rows(1 - sigma_R, x) * velocity
    return over_rows(1 - sigma_next_R, x) * x0 + over_rows(kept_R, x) * noise


def _rounded(x: Tensor, storage_dtype: torch.dtype | None) -> Tensor:
    return x if storage_dtype is None else x.to(storage_dtype).float()


class FlowSDEStrategy(SDEStrategy):
    """The kernel of Flow-GRPO: q = eta sqrt(sigma / (1 - sigma)), sigma_max standing for sigma = 1 below the line.

    Source: Flow-GRPO (arXiv 2505.05470), its SDE; used by MixGRPO (2507.21802) inside the window.
    """

    name = "flow"

    def transition(
        self, x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, *, eta: float, sigma_max: float
    ) -> Transition:
        self._check(x, velocity, sigma_R, sigma_next_R, eta, sigma_max)
        sigma_R, sigma_next_R = sigma_R.float(), sigma_next_R.float()
        below_R = torch.where(sigma_R >= SIGMA_ONE, torch.full_like(sigma_R, sigma_max), sigma_R)
        q_R = eta * (sigma_R / (1 - below_R)).sqrt()
        return self._sde_transition(x, velocity, sigma_R, sigma_next_R, q_R)


class DanceSDEStrategy(SDEStrategy):
    """The kernel of DanceGRPO: a constant diffusion coefficient, q = eta. `sigma_max` does not enter.

    Source: DanceGRPO (arXiv 2505.07818). Its mean, x + v dt - eta^2/2 score dt, is the mean of this module's docstring.
    """

    name = "dance"

    def transition(
        self, x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, *, eta: float, sigma_max: float
    ) -> Transition:
        self._check(x, velocity, sigma_R, sigma_next_R, eta, sigma_max)
        sigma_R, sigma_next_R = sigma_R.float(), sigma_next_R.float()
        return self._sde_transition(x, velocity, sigma_R, sigma_next_R, torch.full_like(sigma_R, eta))


class FlashSDEStrategy(SDEStrategy):
    """The kernel of Flash-GRPO: q = eta sigma_max sigma, which falls with the noise level and is finite everywhere.

    Source: Flash-GRPO (arXiv 2605.15980) and its code, q = eta (sigma_min + (sigma_max - sigma_min) sigma) with
    sigma_min = 0, the last level of the schedule.
    """

    name = "flash"

    def transition(
        self, x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, *, eta: float, sigma_max: float
    ) -> Transition:
        self._check(x, velocity, sigma_R, sigma_next_R, eta, sigma_max)
        sigma_R, sigma_next_R = sigma_R.float(), sigma_next_R.float()
        return self._sde_transition(x, velocity, sigma_R, sigma_next_R, eta * sigma_max * sigma_R)


class CPSSDEStrategy(SDEStrategy):
    """Coefficients-preserving sampling: the marginal at sigma_next is exact for any step length.

    std = sigma_next sin(eta pi / 2); mean = (1 - sigma_next) x0 + sigma_next cos(eta pi / 2) eps_hat; eta in [0, 1] is
    the share of a right angle by which the noise is turned.
    `log_prob` is the published -(y - mean)^2, without 1 / (2 std^2) and without constants: not a density, and finite on
    the last step, where std is 0. `sigma_max` does not enter. Source: Flow-CPS (arXiv 2509.05952).
    """

    name = "cps"
    is_gaussian = False
    max_eta = 1.0

    def transition(
        self, x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, *, eta: float, sigma_max: float
    ) -> Transition:
        self._check(x, velocity, sigma_R, sigma_next_R, eta, sigma_max)
        sigma_R, sigma_next_R = sigma_R.float(), sigma_next_R.float()
        angle = eta * math.pi / 2
        mean = _marginal_mean(x, velocity, sigma_R, sigma_next_R, sigma_next_R * math.cos(angle))
        return Transition(mean=mean, std_R=sigma_next_R * math.sin(angle), q_R=None)

    def log_prob(self, y: Tensor, transition: Transition) -> Tensor:
        """-(y - mean)^2 averaged or summed over the elements, [R] float32. y [R, ...] is detached."""
        check_same_shape(transition.mean, y=y)
        return -reduce_elements((y.detach().float() - transition.mean).square(), self.reduction)


class ConsistencySDEStrategy(CPSSDEStrategy):
    """The steps of CPS with their density; at eta = 1 those of consistency sampling, N((1 - sigma_next) x0,
    sigma_next^2).

    A few-step model predicts a clean latent and noises it anew, which is this step; CM-GRPO takes it as its policy.
    Other than CPS's published log-prob this one is of a Gaussian, so KL and trust regions are exact, and the step to
    sigma = 0, which has no noise, has none. Source: CM-GRPO (arXiv 2605.15190).
    """

    name = "consistency"
    is_gaussian = True
    takes_last_step = False
    asks_for_clean = True

    def transition(
        self, x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, *, eta: float, sigma_max: float
    ) -> Transition:
        moved = super().transition(x, velocity, sigma_R, sigma_next_R, eta=eta, sigma_max=sigma_max)
        return replace(moved, q_R=moved.std_R / (sigma_R.float() - sigma_next_R.float()).sqrt())

    log_prob = SDEStrategy.log_prob  # the density, which CPS does without


class DDIMStrategy(SDEStrategy):
    """DDIM with the noise level eta: 0 is its deterministic step, 1 the ancestral step of DDPM; eta in [0, 1].

    With rho = sigma_next (1 - sigma) / (sigma (1 - sigma_next)), the quotient of the two noise-to-signal ratios,
        std = eta sigma_next sqrt(1 - rho^2),    mean = (1 - sigma_next) x0 + sqrt(sigma_next^2 - std^2) eps_hat.
    In the coordinates of `unirl.sde.variance_preserving` this is the step of Song et al. and of diffusers'
    DDIMScheduler, whose log-probability `published_log_prob` gives; it serves a flow-matching model as well, where
    short steps are those of the Flow kernel with sqrt(2) eta. A density, so `kl` and trust regions are exact. The step
    to sigma = 0 has no noise. `sigma_max` does not enter.
    At eta = 1 it is the stochastic DPM-Solver++ of first order too (diffusers' "sde-dpmsolver++"): e^-h is rho. One of
    second order has no exact density, since what it takes from the step before is the model's own prediction.
    Sources: DDIM (arXiv 2010.02502), equations 12 and 16; as a policy DDPO (arXiv 2305.13301); DPM-Solver++ (arXiv
    2211.01095), SDE-DPM-Solver++.
    """

    name = "ddim"
    max_eta = 1.0
    takes_last_step = False

    def transition(
        self, x: Tensor, velocity: Tensor, sigma_R: Tensor, sigma_next_R: Tensor, *, eta: float, sigma_max: float
    ) -> Transition:
        self._check(x, velocity, sigma_R, sigma_next_R, eta, sigma_max)
        sigma_R, sigma_next_R = sigma_R.float(), sigma_next_R.float()
        step_R = sigma_R - sigma_next_R
        rho_R = sigma_next_R * (1 - sigma_R) / (sigma_R * (1 - sigma_next_R))
        # 1 - rho and 1 - eta^2 (1 - rho^2), written so that nothing cancels for short steps or at eta = 1.
        one_minus_rho_R = step_R / (sigma_R * (1 - sigma_next_R))
        std_R = sigma_next_R * eta * (one_minus_rho_R * (1 + rho_R)).sqrt()
        kept_R = sigma_next_R * (1 - eta**2 + eta**2 * rho_R.square()).sqrt()
        mean = _marginal_mean(x, velocity, sigma_R, sigma_next_R, kept_R)
        return Transition(mean=mean, std_R=std_R, q_R=std_R / step_R.sqrt())
