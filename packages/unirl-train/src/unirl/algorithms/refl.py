"""ReFL: the reward of the clean latent that one late step predicts.

Legend: B samples, T steps.
Source: ImageReward (arXiv 2304.05977), algorithm 1. The published code has 40 steps, trains on one of the last ten and
scales relu(2 - reward) by 1e-3; the paper adds a pre-training loss on given images, the code does not.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.losses import velocity_distance
from unirl.algorithms.reward_gradient import Denoising, RewardGradient
from unirl.sde.forward import interpolate, predict_x0, velocity_target
from unirl.sde.noise import keyed_normal, keyed_uniform
from unirl.types.bounds import NonNegative, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class ReFL(RewardGradient):
    """scale * relu(margin - reward) of x_p - sigma_p v(sg x_p), p drawn from the last steps.

    num_last_steps: p is one of the last so many steps, drawn a sample; 10 of 40 as published.
    scale, margin: as published for ImageReward's standardised reward.
    pretrain_coef: weight of the flow-matching loss on the sample's own clean latent, noised to one of its levels; holds
        the model where its samples are. 0 leaves it out.
    Everything else: see `RewardGradient`.
    """

    trained_rows: ClassVar[str | int | None] = 1

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        num_last_steps: PositiveInt = 10,
        scale: Positive = 1e-3,
        margin: float = 2.0,
        pretrain_coef: NonNegative = 0.0,
        **options: Any,  # Any: the keywords of RewardGradient
    ) -> None:
        self.num_last_steps = num_last_steps
        self.pretrain_coef = pretrain_coef
        super().__init__(pipeline, policies, scale=scale, margin=margin, **options)

    def clean_latents(self, steps: Denoising, keys: list[str]) -> Tensor:
        """What the step drawn for each sample predicts."""
        step_B1 = self.gradient_steps(steps, keys)
        step_B = step_B1[:, 0]
        return predict_x0(steps.at(step_B), steps.stored_velocity(step_B1)[:, 0], steps.sigmas[step_B])

    def gradient_steps(self, steps: Denoising, keys: list[str]) -> Tensor:
        """One of the last steps per sample, [B, 1]. Raises ConfigError if there are not that many."""
        if self.num_last_steps > steps.num_steps:
            raise ConfigError(
                f"algorithm.num_last_steps = {self.num_last_steps} exceeds the {steps.num_steps} steps of the rollout. "
                "Lower it or raise sampling.num_inference_steps."
            )
        draw_B = keyed_uniform([f"{key}::step" for key in keys], self.seed, ()).to(steps.latents.device)
        return (steps.num_steps - 1 - (draw_B * self.num_last_steps).long())[:, None]

    def extra_loss(self, steps: Denoising, keys: list[str], metrics: RowMetrics) -> Tensor | None:
        """The flow-matching loss, one level a sample."""
        if self.pretrain_coef == 0:
            return None
        x0 = steps.latents[:, -1]
        noise = keyed_normal([f"{key}::noise" for key in keys], self.seed, tuple(x0.shape[1:])).to(x0)
        draw_B = keyed_uniform([f"{key}::level" for key in keys], self.seed, ()).to(x0)
        step_B = (draw_B * steps.num_steps).long()
        x_B = interpolate(x0, noise, steps.sigmas[step_B])
        v_B = steps.velocity(x_B, steps.samples, step_B)
        loss_B = velocity_distance(v_B, velocity_target(x0, noise))
        metrics.mean("reward_gradient/pretrain_loss", loss_B)
        return self.pretrain_coef * loss_B
