"""PPO with a value critic over (latent, noise level, text) and generalised advantages along the denoising steps.

The critic says which part of a sample's reward was already foreseeable before each step; what a step is trained on is
what it added. Source: Schulman et al. 2017 (arXiv 1707.06347), on the denoising MDP of DDPO (arXiv 2305.13301).
Legend: B samples, S stochastic steps, C of them trained a sample, R = B C rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, row_chunks
from unirl.algorithms.critic import LatentCritic, pooled_text
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.gae import generalized_advantages
from unirl.algorithms.values import explain_variance, report_values, value_loss
from unirl.sde.loop import transition_rows
from unirl.types.bounds import NonNegative, Positive, PositiveOrInf, UnitInterval, bounded
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import ModuleStore
from unirl.types.training import OptimizerConfig


@bounded("algorithm")
class DiffusionPPO(DiffusionGRPO):
    """DiffusionGRPO's surrogate on generalised advantages, with a critic that learns the returns.

    What the stack passes as advantages is the reward here, given after the last stochastic step: centred on nothing or
    on the batch (`advantages: {center: batch, scale: batch}`), whose statistics are exact over all devices, so that
    advantages need no further whitening. Centred on its group the mean reward of a prompt is gone, and the critic
    could learn nothing from the text. `advantage_clip` bounds the generalised advantage.

    critic: V(x, sigma, text), trained in place. critic_optimizer: its AdamW, under the backend's schedule.
    critic_max_grad_norm: its own clipping.
    gamma, lam: discount and trace decay a stochastic step. lam = 1 trusts the reward alone, lam = 0 the critic alone.
    value_coef: weight of the value loss. The critic has its own optimizer, so it only moves its gradient against
    critic_max_grad_norm.
    value_clip: half-width of the band around the old value outside of which a value gains nothing, in units of the
        reward; None leaves it out.
    Everything else: see `DiffusionGRPO`.
    """

    learns_value: ClassVar[bool] = True
    trains_own_steps: ClassVar[bool] = False

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: ModuleStore,
        *,
        critic: LatentCritic,
        critic_optimizer: OptimizerConfig,
        critic_max_grad_norm: PositiveOrInf = 1.0,
        gamma: UnitInterval = 1.0,
        lam: UnitInterval = 0.95,
        value_coef: NonNegative = 0.5,
        value_clip: Positive | None = 0.2,
        **options: Any,  # Any: the keywords of DiffusionGRPO
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self._modules = policies
        self.critic = critic
        self.critic_optimizer = critic_optimizer
        self.critic_max_grad_norm = critic_max_grad_norm
        self.gamma = gamma
        self.lam = lam
        self.value_coef = value_coef
        self.value_clip = value_clip
        self.uses_anchor = True

    def prepare(self) -> None:
        """Let the critic train together with the policy."""
        super().prepare()
        self._modules.add_module("critic", self.critic, self.critic_optimizer, max_grad_norm=self.critic_max_grad_norm)

    def trust_rollout(self) -> None:
        """The anchor goes on to hold what the critic says."""
        super().trust_rollout()
        self.uses_anchor = True

    def anchor(self, micro: MicroBatch) -> dict[str, Tensor]:
        """The anchor of the policy, and value, advantage and return [B, C] under the critic before the first update."""
        return {**(super().anchor(micro) if self.replays_old else {}), **self._valued(micro)}

    def _valued(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Value, advantage and return [B, C] under the present critic.

        The advantages run over all stochastic steps, also those that `step_fraction` leaves out of training.
        """
        num_samples, steps = micro.segment.batch_size, sorted(micro.segment.sde_indices)
        with torch.no_grad():
            values_BS = self._values(micro, *transition_rows(num_samples, steps)).view(num_samples, -1)
        advantages_BS, returns_BS = generalized_advantages(micro.advantages, values_BS, gamma=self.gamma, lam=self.lam)
        sample_R, step_R = self.rows(micro)
        columns = [steps.index(step) for step in step_R.tolist()]
        fields = {"value": values_BS, "advantage": advantages_BS, "return": returns_BS}
        return {name: tensor.float()[sample_R, columns].view(num_samples, -1) for name, tensor in fields.items()}

    def row_advantages(self, micro: MicroBatch, sample_R: Tensor, step_R: Tensor) -> Tensor:
        """The generalised advantage of every row [R]."""
        return micro.anchor["advantage"].flatten()

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """The parts of the policy, each with the value loss of its rows."""
        if "value" not in micro.anchor:  # the first update: the critic has not changed yet
            micro = replace(micro, anchor={**micro.anchor, **self._valued(micro)})
        sample_R, step_R = self.rows(micro)
        old_R, return_R = (micro.anchor[name].flatten() for name in ("value", "return"))
        chunks = row_chunks(sample_R.numel(), self.rows_per_forward)
        for part, rows in zip(super().losses(micro), chunks, strict=True):
            value_R = self._values(micro, sample_R[rows], step_R[rows])
            loss_R = value_loss(value_R, old_R[rows], return_R[rows], clip=self.value_clip)
            report_values(part.metrics, value_R, return_R[rows], loss_R)
            yield LossPart(part.loss + self.value_coef * loss_R.sum(), part.num_terms, part.metrics)

    def after_update(self, metrics: dict[str, float], num_samples: int) -> None:
        """Say how much of the returns' variance the critic explains."""
        super().after_update(metrics, num_samples)
        explain_variance(metrics)

    def _values(self, micro: MicroBatch, sample_R: Tensor, step_R: Tensor) -> Tensor:
        """V [R] of the latents before the steps, under the present critic."""
        text = pooled_text(micro.track.conditions)
        values = []
        for rows in row_chunks(sample_R.numel(), self.rows_per_forward):
            x_R, _, sigma_R, _ = micro.segment.transitions(sample_R[rows], step_R[rows])
            values.append(self.critic(x_R, sigma_R, None if text is None else text[sample_R[rows]]))
        return torch.cat(values)
