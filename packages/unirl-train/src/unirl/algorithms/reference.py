"""The penalty that holds a policy near the one it started from: one component for every algorithm.

The reference itself belongs to the backend (`PolicyStore.reference_policy`: LoRA switched off, or a frozen copy).
Legend: R rows, one (sample, step) pair each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from unirl.algorithms.base import RowMetrics, StageAlgorithm
from unirl.algorithms.kl import AdaptiveKL, adapted_coefficient
from unirl.algorithms.losses import MAX_LOG_RATIO
from unirl.sde.likelihood import code_kl, transition_kl
from unirl.sde.rows import over_rows
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import TransitionStats
from unirl.types.protocols.training import PolicyStore

KLEstimator = Literal["exact", "flow_grpo", "velocity", "k1", "k2", "k3"]
METRIC = "policy/reference_kl"
SHARE = "policy/penalty_share"
_PENALTY_SIZE, _LOSS_SIZE = "penalty_size", "loss_size"
"""Mean sizes that the share is made of, summed over devices before."""

ResultT = TypeVar("ResultT")


def sampled_kl(logp_R: Tensor, reference_R: Tensor, estimator: str) -> Tensor:
    """Estimators of KL(policy || reference) from one action's log-probs, [R]: with d = log p_ref - log p,
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 with d at most MAX_LOG_RATIO, beyond which k3 has no gradient.

    k1 and k3 are unbiased for actions of the policy itself, k3 is never negative. Source: Schulman 2020, "Approximating
    KL Divergence".
    """
    difference = reference_R.detach() - logp_R
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    # Log-ratios of means over a latent are 1e-4 and less: exp(d) - 1 in float32 would leave nothing of d^2 / 2.
    bounded = difference.clamp(max=MAX_LOG_RATIO)
    return bounded.expm1() - bounded


class ReferenceKL:
    """coef * KL(policy || reference), with a fixed or an adaptive coefficient.

    coef: weight of the penalty; 0 switches the reference off.
    estimator, for transitions: "exact" is the Gaussian transition KL per latent element; "flow_grpo" the published
        code's form, which weights each step by |d sigma|; "velocity" is mean (v - v_ref)^2, which weights steps alike
        (UniGRPO, arXiv 2603.23500); "k1", "k2", "k3" estimate it from the stored actions.
    adaptive: drives the coefficient towards a target KL.
    """

    def __init__(
        self,
        policies: PolicyStore,
        *,
        coef: float = 0.0,
        estimator: KLEstimator = "exact",
        adaptive: AdaptiveKL | None = None,
    ) -> None:
        if adaptive is not None and coef == 0:
            raise ConfigError("algorithm.adaptive_kl needs a starting algorithm.kl_coef above 0")
        self._policies = policies
        self.coef = coef
        self.estimator: KLEstimator = estimator
        self.adaptive = adaptive

    @property
    def is_on(self) -> bool:
        """True if anything is added to the loss."""
        return self.coef > 0

    def evaluate(self, forward: Callable[[], ResultT]) -> ResultT | None:
        """`forward()` under the reference, without gradients; None where the penalty is off.

        Call it before the policy's own forward: it swaps parameter values, which a pending backward would not survive.
        """
        if not self.is_on:
            return None
        with torch.no_grad(), self._policies.reference_policy():
            return forward()

    def of_transitions(self, policy: TransitionStats, reference: TransitionStats, metrics: RowMetrics) -> Tensor:
        """KL of stored transitions, [R], per latent element under a kernel with mean reduction.

        Raises ConfigError if the kernel does not support the estimator.
        """
        if self.estimator in ("k1", "k2", "k3"):
            return self.of_actions(policy.logp_R, reference.logp_R, metrics)
        if self.estimator == "flow_grpo":
            if policy.q_R is None:
                raise ConfigError("kl_estimator = 'flow_grpo' needs a Flow or Dance kernel; use kl_estimator: exact")
            return code_kl(policy.mean, reference.mean, policy.q_R)
        if self.estimator == "velocity":
            # The mean is linear in the velocity.
            moved = (policy.mean - reference.mean.detach()) / over_rows(policy.gain_R, policy.mean)
            return moved.square().flatten(1).mean(dim=1)
        if not bool((policy.std_R > 0).all()):
            raise ConfigError(
                "a transition without noise has no KL to a reference (CPS adds none at the last step). "
                "Leave the last step out of sampling.scheduler, or set algorithm.kl_coef: 0."
            )
        return transition_kl(policy.mean, reference.mean, policy.std_R)

    def of_actions(self, logp_R: Tensor, reference_R: Tensor, metrics: RowMetrics) -> Tensor:
        """KL [R] from the log-probs of sampled actions that have no closed form, such as tokens, by k1, k2 or k3."""
        if self.estimator == "k3":
            metrics.mean("policy/reference_kl_bounded_fraction", reference_R - logp_R > MAX_LOG_RATIO)
        return sampled_kl(logp_R, reference_R, self.estimator)

    def penalty(
        self,
        kl_R: Tensor,
        metrics: RowMetrics,
        step_R: Tensor | None = None,
        steps: Sequence[int] = (),
        *,
        loss: Tensor | None,
    ) -> Tensor:
        """coef * kl_R, reported as `policy/reference_kl`, and for each of `steps` on its own where step_R is given.

        loss: the terms that it is added to, of any shape; `policy/penalty_share` compares the sizes of both. None where
            the size of a term says nothing of its gradient.
        """
        metrics.mean(METRIC, kl_R)
        if loss is not None:
            metrics.mean(_PENALTY_SIZE, (self.coef * kl_R.detach()).abs())
            metrics.mean(_LOSS_SIZE, loss.detach().abs())
        if step_R is not None:
            for step in steps:
                metrics.mean(f"{METRIC}/ts_{step}", kl_R[(step_R == step).to(kl_R.device)])
        return self.coef * kl_R

    def after_update(self, metrics: dict[str, float], num_samples: int) -> None:
        """Report the penalty's share of the loss, and adapt the coefficient to the measured KL."""
        if _PENALTY_SIZE in metrics:
            penalty, loss = metrics.pop(_PENALTY_SIZE), metrics.pop(_LOSS_SIZE)
            metrics[SHARE] = penalty / (penalty + loss) if penalty > 0 else 0.0
        if self.adaptive is not None and METRIC in metrics:
            self.coef = adapted_coefficient(
                self.coef,
                metrics[METRIC],
                target=self.adaptive.target,
                horizon=self.adaptive.horizon,
                num_samples=num_samples,
            )
            metrics["policy/kl_coef"] = self.coef


class PenalisedAlgorithm(StageAlgorithm):
    """What algorithms with a penalty towards the reference and keyed draws keep: both are part of a checkpoint."""

    def __init__(self, reference: ReferenceKL, *, seed: int) -> None:
        self.reference = reference
        self.seed = seed
        """Base seed of every draw."""
        self.num_rollouts = 0
        """Rollouts trained on; part of the key of every draw."""

    def after_update(self, metrics: dict[str, float], num_samples: int) -> None:
        """Adapt the penalty's coefficient to the measured KL."""
        self.reference.after_update(metrics, num_samples)

    def after_rollout(self) -> dict[str, float]:
        """Count the rollout."""
        self.num_rollouts += 1
        return {}

    def state_dict(self) -> dict[str, float]:
        """The adapted coefficient and the number of rollouts."""
        return {"kl_coef": self.reference.coef, "num_rollouts": self.num_rollouts}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore `state_dict`."""
        self.reference.coef = state["kl_coef"]
        self.num_rollouts = int(state["num_rollouts"])
