"""DMD2 with a reward: a sampler of few steps that goes to where the teacher, tilted towards the reward, would be.

No gradient of the reward is needed. A surrogate, a copy of the model that DGPO trains on groups of the student's own
samples, learns the tilt as a density ratio: log p_surrogate - log p_teacher at every noise level rises with the reward
that it has seen. The gradient of that ratio at the student's images x, asked where they are noised to
x_s = (1 - s) x + s eps, is added to DMD2's:

    g = g_DMD2 + reward_weight (x_teacher - x_surrogate) / max(mean |x - x_surrogate|, 1e-6)

with x_surrogate = x_s - s v_surrogate, guided by surrogate_guidance, and x_teacher = x_s - s v_teacher, not guided.
Source: TDM-R1, Luo et al. 2026 (arXiv 2603.07700) and its code: the surrogate, this gradient with its divisor, and a
sum with the gradient of the matching. Its matching and the latents that its surrogate learns from are choices here
(`matching: trajectory`, `surrogate_latents: trajectory`); by default the matching is DMD2's and the surrogate learns
from samples.
Legend: R rows, see `unirl.algorithms.dmd2`; units and groups, see `unirl.algorithms.dgpo`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unirl.algorithms.base import MicroBatch, RowMetrics
from unirl.algorithms.dgpo import DGPO
from unirl.algorithms.dmd2 import DMD2, GuidanceScale, matching_direction
from unirl.algorithms.forward_process import ForwardRows
from unirl.algorithms.losses import velocity_distance
from unirl.algorithms.trajectory_surrogate import TrajectoryDGPO
from unirl.sde.forward import predict_x0
from unirl.types.bounds import NonNegative, OpenUnitInterval, Positive, PositiveInt, PositiveOrInf, bounded
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import CopyTrainer
from unirl.types.training import OptimizerConfig

SurrogateLatents = Literal["clean", "trajectory"]

SURROGATE = "surrogate"
"""Name of the copy that learns the reward."""
_NAMES = {
    "policy/loss": "dmd2/surrogate_loss",
    "advantage/clipped_fraction": "advantage/clipped_fraction",
    "dgpo/margin": "dgpo/margin",
    "dgpo/policy_distance": "dgpo/policy_distance",
    "dgpo/held_fraction": "dgpo/held_fraction",
}
"""What is reported of the surrogate, by its name in DGPO."""


def reward_share(matching: Tensor, reward: Tensor) -> Tensor:
    """mean |reward| / (mean |matching| + mean |reward|) of each row [R], 0 where both are 0."""
    sizes = [direction.abs().flatten(1).mean(dim=1) for direction in (matching, reward)]
    return sizes[1] / (sizes[0] + sizes[1]).clamp(min=torch.finfo(sizes[0].dtype).tiny)


@bounded("algorithm")
class DMD2WithReward(DMD2):
    """DMD2, and a surrogate of the reward that takes a step of DGPO before each update of the student.

    samples_per_group: the samples of a prompt, which the surrogate compares.
    surrogate_optimizer: AdamW of the surrogate, under the backend's schedule.
    surrogate_max_grad_norm: its own clipping.
    surrogate_levels: noise levels, uniform between 0 and 1, that it trains at for each sample.
    surrogate_latents: what it trains on, `clean` the samples, `trajectory` also latents on the way there, with less
        weight (see `TrajectoryDGPO`) and at levels between reward_min_level and 1.
    surrogate_beta: how soon its loss fades as a group becomes ordered, `DGPO.beta`.
    surrogate_radius: how far its velocity may go from the teacher's, `DGPO.trust_radius`.
    surrogate_kl: weight of its mean squared distance from the teacher's velocity.
    advantage_clip: half-width of the advantages, None leaves them.
    surrogate_guidance: classifier-free guidance of the surrogate where the student is trained; 1 for none.
    reward_weight: of the learnt reward's gradient, next to 1 for the matching.
    reward_min_level: the least noise level that this gradient is taken at; the greatest is max_level.
    Everything else: see `DMD2`.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.dmd2_reward_rules"
    unit_option: ClassVar[str | None] = "samples_per_group"
    requires_centred_advantages: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: CopyTrainer,
        *,
        samples_per_group: PositiveInt,
        surrogate_optimizer: OptimizerConfig,
        surrogate_max_grad_norm: PositiveOrInf = 1.0,
        surrogate_levels: PositiveInt = 2,
        surrogate_latents: SurrogateLatents = "clean",
        surrogate_beta: Positive = 10.0,
        surrogate_radius: PositiveOrInf | None = 0.05,
        surrogate_kl: NonNegative = 0.001,
        surrogate_guidance: GuidanceScale = 1.0,
        advantage_clip: PositiveOrInf | None = 5.0,
        reward_weight: Positive = 0.7,
        reward_min_level: OpenUnitInterval = 0.3,
        **options: Any,  # Any: the keywords of DMD2
    ) -> None:
        self.samples_per_unit = samples_per_group
        super().__init__(pipeline, policies, **options)
        if reward_min_level >= self.max_level:
            raise ConfigError(
                f"algorithm.reward_min_level = {reward_min_level} must be below algorithm.max_level = "
                f"{self.max_level}: noise levels are drawn between them."
            )
        make = DGPO if surrogate_latents == "clean" else partial(TrajectoryDGPO, min_level=reward_min_level)
        self._surrogate: DGPO = make(
            pipeline,
            policies,
            samples_per_group=samples_per_group,
            beta=surrogate_beta,
            advantage_clip=advantage_clip,
            num_timesteps=surrogate_levels,
            timestep_sampler="uniform",
            trust_radius=surrogate_radius,
            kl_coef=surrogate_kl,
            rows_per_forward=self.rows_per_forward,
            seed=self.seed,
            params=self._params,
        )
        self.surrogate_optimizer = surrogate_optimizer
        self.surrogate_max_grad_norm = surrogate_max_grad_norm
        self.surrogate_guidance = surrogate_guidance
        self.reward_weight = reward_weight
        self.reward_min_level = reward_min_level

    def prepare(self) -> None:
        """Keep the starting weights as the fake score and as the surrogate, which train from there."""
        super().prepare()
        self._policies.train_copy(SURROGATE, self.surrogate_optimizer, max_grad_norm=self.surrogate_max_grad_norm)

    def before_update(self, micros: Sequence[MicroBatch]) -> RowMetrics:
        """Train the fake score on what the present student makes, and the surrogate on the samples and advantages."""
        metrics = super().before_update(micros)
        self._surrogate.num_rollouts = self.num_rollouts
        losses: list[Callable[[], Tensor]] = []
        for micro in micros:
            for _, rows in self._surrogate.forward_rows(micro):
                with torch.no_grad(), self._policies.reference_policy():
                    v_reference = rows.velocity()
                losses.append(partial(self._surrogate_loss, micro, rows, v_reference, metrics))
        stats = self._policies.copy_step(SURROGATE, losses, sum(self._surrogate.num_terms(m.track) for m in micros))
        metrics.add("dmd2/surrogate_grad_norm", torch.tensor(stats.grad_norm), 1)
        metrics.add("dmd2/surrogate_skipped_fraction", torch.tensor(float(stats.is_skipped)), 1)
        return metrics

    def _surrogate_loss(self, micro: MicroBatch, rows: ForwardRows, v_reference: Tensor, metrics: RowMetrics) -> Tensor:
        """Sum over (unit, level) of DGPO's loss."""
        part = self._surrogate.part(micro, rows, v_reference)
        for name, (total, count) in part.metrics.sums.items():
            if name in _NAMES:
                metrics.add(_NAMES[name], total, count)
        return part.loss

    def _direction(self, micro: MicroBatch, rows: slice, x: Tensor, metrics: RowMetrics) -> Tensor:
        """g at the images x, without gradients."""
        matching = super()._direction(micro, rows, x, metrics)
        reward = self.reward_weight * self._reward_direction(micro, rows, x, metrics)
        metrics.mean("dmd2/reward_share", reward_share(matching, reward))
        return matching + reward

    def _reward_direction(self, micro: MicroBatch, rows: slice, x: Tensor, metrics: RowMetrics) -> Tensor:
        """Minus the gradient of the learnt reward at the images x, normalised as the matching is."""
        params = self._sampled(micro)
        plain = dataclasses.replace(params, guidance_scale=1.0)
        guided = dataclasses.replace(params, guidance_scale=self.surrogate_guidance)
        at = self.noised(micro, rows, x, "reward", min_level=self.reward_min_level)
        with torch.no_grad():
            conditions = {**at.conditions, **self._negatives(micro, rows, guided)}
            with self._policies.using_policy(SURROGATE):
                v_surrogate = self._velocity(at, conditions, guided)
            with self._policies.reference_policy():
                v_teacher = self._velocity(at, at.conditions, plain)
            x_surrogate, x_teacher = (predict_x0(at.x_s, v, at.level_R) for v in (v_surrogate, v_teacher))
        metrics.mean("dmd2/reward_distance", velocity_distance(v_surrogate, v_teacher))
        return matching_direction(x, x_teacher, x_surrogate)
