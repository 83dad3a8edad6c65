"""DRTune: reward gradients of a few steps spread over the whole trajectory, without Jacobian products.

Every velocity is taken at a stored latent that carries no gradient, so the clean latent depends on the weights through
the sum of the steps alone: d x_T / d theta = sum_{n in S} dt_n d v(sg x_n) / d theta.
Legend: B samples, K gradient steps per sample, T steps.
Source: DRTune (arXiv 2405.00760), algorithm 1.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.reward_gradient import Denoising, RewardGradient, straight_through
from unirl.sde.forward import predict_x0
from unirl.sde.noise import keyed_uniform
from unirl.sde.rows import over_rows
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class DRTune(RewardGradient):
    """The reward of a clean latent to which K equally spaced steps contribute their gradients.

    num_gradient_steps: K, spaced equally with a random offset a sample; one forward of B K rows.
    early_stop: largest number of last steps that one prediction of the clean latent replaces, drawn a sample from
        1 .. early_stop; 1 always runs to the end. The gradient steps are among the steps that are run.
    Everything else: see `RewardGradient`.
    """

    trained_rows: ClassVar[str | int | None] = "num_gradient_steps"

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        num_gradient_steps: PositiveInt = 5,
        early_stop: PositiveInt = 1,
        **options: Any,  # Any: the keywords of RewardGradient
    ) -> None:
        self.num_gradient_steps = num_gradient_steps
        self.early_stop = early_stop
        super().__init__(pipeline, policies, **options)

    @property
    def rows_per_sample(self) -> int:
        """K."""
        return self.num_gradient_steps

    def clean_latents(self, steps: Denoising, keys: list[str]) -> Tensor:
        """x_p - sigma_p v_p for the last step p that is run (x_T where p = T - 1), with the gradient of the K steps."""
        last_B = self._last_steps(steps, keys)
        step_BK = self.gradient_steps(steps, keys)
        change_T = steps.sigmas.diff()
        # The stored steps say what the velocity at x_p was: no forward is needed for it.
        x_B = steps.at(last_B)
        v_B = (steps.at(last_B + 1) - x_B) / over_rows(change_T[last_B], x_B)
        value = predict_x0(x_B, v_B, steps.sigmas[last_B])
        is_last_BK = step_BK == last_B[:, None]
        weight_BK = torch.where(is_last_BK, -steps.sigmas[step_BK], change_T[step_BK])
        return straight_through(steps, value, step_BK, weight_BK)

    def gradient_steps(self, steps: Denoising, keys: list[str]) -> Tensor:
        """K equally spaced steps of the first p + 1 with a random offset, [B, K]."""
        num_run_B = self._last_steps(steps, keys) + 1
        offset_B = keyed_uniform([f"{key}::offset" for key in keys], self.seed, ()).to(num_run_B.device)
        place_K = torch.arange(self.num_gradient_steps, device=num_run_B.device)
        spaced_BK = (place_K + offset_B[:, None]) * num_run_B[:, None] / self.num_gradient_steps
        return torch.minimum(spaced_BK.floor().long(), num_run_B[:, None] - 1)

    def _last_steps(self, steps: Denoising, keys: list[str]) -> Tensor:
        """The last step that is run, int64 [B]. Raises ConfigError if fewer than K steps would be run."""
        if steps.num_steps - self.early_stop + 1 < self.num_gradient_steps:
            raise ConfigError(
                f"algorithm.num_gradient_steps = {self.num_gradient_steps} do not fit into the "
                f"{steps.num_steps} - {self.early_stop} + 1 steps that are always run. Lower num_gradient_steps or "
                "early_stop, or raise sampling.num_inference_steps."
            )
        draw_B = keyed_uniform([f"{key}::stop" for key in keys], self.seed, ()).to(steps.latents.device)
        return steps.num_steps - 1 - (draw_B * self.early_stop).long()
