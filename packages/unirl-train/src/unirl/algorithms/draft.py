"""DRaFT: reward gradients through the last steps of the sampler.

Legend: B samples, K last steps, T steps, n noisings.
Source: DRaFT (arXiv 2309.17400), algorithms 1 (DRaFT-K) and 2 (DRaFT-LV).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.reward_gradient import Denoising, RewardGradient, unrolled
from unirl.sde.forward import interpolate, predict_x0
from unirl.sde.noise import keyed_normal
from unirl.types.bounds import NonNegativeInt, PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class DRaFT(RewardGradient):
    """The reward with its full gradient through the last K steps.

    num_last_steps: K; 1 is DRaFT-1. The steps before have no gradient.
    num_noisings: 0 follows the sampler. n >= 1 is DRaFT-LV, of less variance and for K = 1 alone: the clean latent is
        noised n times anew to the last level above 0, and a sample's loss is the mean over the n that come back.
    Everything else: see `RewardGradient`.
    """

    trained_rows: ClassVar[str | int | None] = "num_last_steps"

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        num_last_steps: PositiveInt = 1,
        num_noisings: NonNegativeInt = 0,
        **options: Any,  # Any: the keywords of RewardGradient
    ) -> None:
        if num_noisings and num_last_steps != 1:
            raise ConfigError(
                f"algorithm.num_noisings = {num_noisings} noises to the last step alone, num_last_steps = "
                f"{num_last_steps}. Set num_last_steps: 1, or num_noisings: 0."
            )
        self.num_last_steps = num_last_steps
        self.num_noisings = num_noisings
        super().__init__(pipeline, policies, **options)

    @property
    def rows_per_sample(self) -> int:
        """n under DRaFT-LV, else one."""
        return max(self.num_noisings, 1)

    def clean_latents(self, steps: Denoising, keys: list[str]) -> Tensor:
        """[B, ...] at the end of the sampler, or [B n, ...] of DRaFT-LV."""
        if self.num_noisings:
            return self._noised_anew(steps, keys)
        return unrolled(steps, self._first_step(steps))

    def gradient_steps(self, steps: Denoising, keys: list[str]) -> Tensor:
        """The last K steps, [B, K]."""
        step_K = torch.arange(self._first_step(steps), steps.num_steps, device=steps.latents.device)
        return step_K.expand(steps.num_samples, -1)

    def _first_step(self, steps: Denoising) -> int:
        """T - K. Raises ConfigError if there are not that many steps."""
        if self.num_last_steps > steps.num_steps:
            raise ConfigError(
                f"algorithm.num_last_steps = {self.num_last_steps} exceeds the {steps.num_steps} steps of the rollout. "
                "Lower it or raise sampling.num_inference_steps."
            )
        return steps.num_steps - self.num_last_steps

    def _noised_anew(self, steps: Denoising, keys: list[str]) -> Tensor:
        x0 = steps.latents[:, -1]
        shape = (self.num_noisings, *x0.shape[1:])
        noise = keyed_normal([f"{key}::noise" for key in keys], self.seed, shape).to(x0).flatten(0, 1)
        sample_R = steps.samples.repeat_interleave(self.num_noisings)
        step_R = torch.full_like(sample_R, steps.num_steps - 1)
        sigma_R = steps.sigmas[step_R]
        x_R = interpolate(x0[sample_R], noise, sigma_R)
        return predict_x0(x_R, steps.velocity(x_R, sample_R, step_R), sigma_R)
