"""AlignProp: reward gradients through the whole sampler, cut at a random depth.

Legend: B samples, T steps.
Source: AlignProp (arXiv 2310.03739), section 4: back-propagation through time with checkpointed steps, truncated at
K drawn from 1 .. T.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from unirl.algorithms.reward_gradient import Denoising, RewardGradient, unrolled
from unirl.sde.noise import keyed_uniform
from unirl.types.bounds import bounded
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore

Truncation = Literal["random", "full"]


@bounded("algorithm")
class AlignProp(RewardGradient):
    """The reward with its gradient through the last K steps; each step is checkpointed.

    truncation: "random" draws K uniformly from 1 .. T, anew for each rollout; "full" is K = T.
    Everything else: see `RewardGradient`; the penalty is taken at one of the K steps, drawn anew.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        truncation: Truncation = "random",
        is_checkpointed: bool = True,
        **options: Any,  # Any: the keywords of RewardGradient
    ) -> None:
        self.truncation: Truncation = truncation
        super().__init__(pipeline, policies, is_checkpointed=is_checkpointed, **options)

    def clean_latents(self, steps: Denoising, keys: list[str]) -> Tensor:
        """[B, ...] at the end of the sampler."""
        return unrolled(steps, self.first_step(steps))

    def first_step(self, steps: Denoising) -> int:
        """The first step with a gradient, T - K. The depth is the rollout's, not the sample's."""
        if self.truncation == "full":
            return 0
        return int(keyed_uniform([f"r{self.num_rollouts}::depth"], self.seed, ()) * steps.num_steps)

    def gradient_steps(self, steps: Denoising, keys: list[str]) -> Tensor:
        """One of the K steps per sample, [B, 1]."""
        first = self.first_step(steps)
        draw_B = keyed_uniform([f"{key}::penalty" for key in keys], self.seed, ()).to(steps.latents.device)
        return (first + (draw_B * (steps.num_steps - first)).long())[:, None]
