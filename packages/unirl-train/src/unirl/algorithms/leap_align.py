"""LeapAlign: reward gradients through two leaps over the trajectory, whose ends are the sampler's own latents.

Legend: B samples, T steps.
Source: LeapAlign (arXiv 2604.15311), eqs. 6 and 9, and its code.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from unirl.algorithms.reward_gradient import Denoising, RewardGradient
from unirl.sde.forward import predict_x0
from unirl.sde.noise import keyed_uniform
from unirl.sde.rows import over_rows
from unirl.types.bounds import Positive, UnitInterval, bounded
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class LeapAlign(RewardGradient):
    """The reward of the stored clean latent, with the gradient of two leaps: x_k to x_j, and x_j to it.

        x_j^ = x_k + (sigma_j - sigma_k) v(x_k),   x_j := x_j^ + sg(x_j - x_j^)
        x_T^ = x_j - sigma_j v(sg x_j + nested (x_j - sg x_j)),   x_T := x_T^ + sg(x_T - x_T^)

    k and j are two different steps, drawn uniformly for each sample; two forwards of B rows, one after the other.
    nested: how much of the gradient that goes through v at x_j is kept, in [0, 1]; 0 leaves the two steps' own.
    min_distance: a sample weighs 1 / (d_j + d_T), d = max(mean |x^ - x|, min_distance): the nearer the leaps come to
        the sampler's latents, the more it counts. None weighs all alike.
    Everything else: see `RewardGradient`.
    """

    trained_rows: ClassVar[str | int | None] = 2

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        nested: UnitInterval = 0.3,
        min_distance: Positive | None = 0.1,
        **options: Any,  # Any: the keywords of RewardGradient
    ) -> None:
        self.nested = nested
        self.min_distance = min_distance
        super().__init__(pipeline, policies, **options)

    def clean_latents(self, steps: Denoising, keys: list[str]) -> Tensor:
        """x_T with the weighted gradient of the two leaps, [B, ...]."""
        first_B, second_B = self.gradient_steps(steps, keys).unbind(dim=1)
        sigma_B = steps.sigmas[second_B]
        v_first = steps.stored_velocity(first_B[:, None])[:, 0]
        leapt = steps.at(first_B) + over_rows(sigma_B - steps.sigmas[first_B], v_first) * v_first
        middle = _with_value(leapt, steps.at(second_B))
        v_second = steps.velocity(_with_value(self.nested * leapt, steps.at(second_B)), steps.samples, second_B)
        clean = predict_x0(middle, v_second, sigma_B)
        end = steps.latents[:, -1]
        if self.min_distance is None:
            return _with_value(clean, end)
        near_B, far_B = _distance(leapt, steps.at(second_B)), _distance(clean, end)
        weight_B = 1 / (near_B.clamp(min=self.min_distance) + far_B.clamp(min=self.min_distance))
        return _with_value(clean * over_rows(weight_B, clean), end)

    def gradient_steps(self, steps: Denoising, keys: list[str]) -> Tensor:
        """Two different steps, ascending, [B, 2]. Raises ConfigError if there is only one."""
        if steps.num_steps < 2:
            raise ConfigError("LeapAlign leaps twice. Raise sampling.num_inference_steps to 2 at least.")
        draw_BT = keyed_uniform([f"{key}::leaps" for key in keys], self.seed, (steps.num_steps,))
        return draw_BT.argsort(dim=1, stable=True)[:, :2].sort(dim=1).values.to(steps.latents.device)


def _with_value(gradient: Tensor, value: Tensor) -> Tensor:
    """`value` with the gradient of `gradient`."""
    return value + (gradient - gradient.detach())


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """mean |x - y| a sample, [B], without gradient."""
    return (x - y).detach().abs().flatten(1).mean(dim=1)
