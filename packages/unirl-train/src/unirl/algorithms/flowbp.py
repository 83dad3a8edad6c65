"""FlowBP-sparse: the exact clean latent of the sampler, with the gradients of a few of its steps.

Legend: B samples, K gradient steps per sample, T steps.
Source: FlowBP (arXiv 2606.11075) and its code, the sparse variant.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.reward_gradient import Denoising, RewardGradient, straight_through
from unirl.sde.noise import keyed_uniform
from unirl.types.bounds import NonNegative, PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class FlowBPSparse(RewardGradient):
    """The reward of the stored clean latent, to which K drawn steps contribute their gradients.

    d x_T / d theta = f sum over n in S of dt_n d v(sg x_n) / d theta, as in DRTune, but the reward sees x_T itself.
    num_gradient_steps: K distinct steps, drawn anew for each sample; one forward of B K rows.
    late_bias: step n is drawn with weight (n + 1)^late_bias; 0 is uniform.
    rescale: f = 1 + rescale (sum of all |dt| / sum of |dt_n| in S - 1). 0 takes the steps as long as they are, 1 as if
        they were the whole way.
    Everything else: see `RewardGradient`.
    """

    trained_rows: ClassVar[str | int | None] = "num_gradient_steps"

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        num_gradient_steps: PositiveInt = 3,
        late_bias: NonNegative = 2.0,
        rescale: NonNegative = 0.0,
        **options: Any,  # Any: the keywords of RewardGradient
    ) -> None:
        self.num_gradient_steps = num_gradient_steps
        self.late_bias = late_bias
        self.rescale = rescale
        super().__init__(pipeline, policies, **options)

    @property
    def rows_per_sample(self) -> int:
        """K."""
        return self.num_gradient_steps

    def clean_latents(self, steps: Denoising, keys: list[str]) -> Tensor:
        """x_T with the gradient of the K steps, [B, ...]."""
        step_BK = self.gradient_steps(steps, keys)
        change_T = steps.sigmas.diff()
        weight_BK = change_T[step_BK]
        share_B1 = change_T.sum() / weight_BK.sum(dim=1, keepdim=True)
        return straight_through(steps, steps.latents[:, -1], step_BK, weight_BK * (1 + self.rescale * (share_B1 - 1)))

    def gradient_steps(self, steps: Denoising, keys: list[str]) -> Tensor:
        """K of the T steps without repetition, ascending, [B, K]. Raises ConfigError if there are fewer."""
        if self.num_gradient_steps > steps.num_steps:
            raise ConfigError(
                f"algorithm.num_gradient_steps = {self.num_gradient_steps} exceeds the {steps.num_steps} steps of the "
                "rollout. Lower it, or raise sampling.num_inference_steps."
            )
        weight_T = torch.arange(1, steps.num_steps + 1, dtype=torch.float64) ** self.late_bias
        draw_BT = keyed_uniform([f"{key}::steps" for key in keys], self.seed, (steps.num_steps,)).double()
        # The first of T exponential waiting times with these rates, then the next: draws without repetition.
        waiting_BT = -(1 - draw_BT).log() / weight_T
        first_BK = waiting_BT.topk(self.num_gradient_steps, dim=1, largest=False).indices
        return first_BK.sort(dim=1).values.to(steps.latents.device)
