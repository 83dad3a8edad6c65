"""SRPO: the reward of a noised sample after one step of the model, with the known noise taken out again.

A clean sample is noised to a level of the schedule, the model takes one step, and the rest of the noise is known, since
it was put there: no prediction of a clean latent is needed, so early levels train too (Direct-Align). The reward may be
relative: what a scorer that reads the prompt gains from positive words over negative ones.
Legend: B samples, R rows.
Source: Shen et al. 2025 (arXiv 2509.06942).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from unirl.algorithms.losses import same_shape
from unirl.algorithms.reward_gradient import Denoising, RewardGradient
from unirl.sde.forward import interpolate, velocity_target
from unirl.sde.noise import keyed_normal, keyed_uniform
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.rewards import DifferentiableReward
from unirl.types.protocols.training import PolicyStore
from unirl.types.reward import RewardRequest


def direct_align(x0: Tensor, v: Tensor, target: Tensor, sigma_R: Tensor, sigma_next_R: Tensor) -> Tensor:
    """x0 + (sigma_next - sigma) / (1 - sigma_next) (v - u), [R, ...], with gradients to v: the clean latent after one
    step.

    With x = (1 - sigma) x0 + sigma eps and u = eps - x0 the step x' = x + (sigma_next - sigma) v leaves
    (x' - sigma_next eps) / (1 - sigma_next), which this is: x0 itself where v = u, at any level.
    x0, target: clean latents and u, without gradients. sigma_R > sigma_next_R in [0, 1).
    """
    same_shape(x0=x0, v=v, target=target)
    same_shape(sigma_R=sigma_R, sigma_next_R=sigma_next_R)
    weight_R = (sigma_next_R - sigma_R) / (1 - sigma_next_R)
    return x0 + weight_R.view(-1, *(1,) * (x0.ndim - 1)) * (v - target)


@bounded("algorithm")
class SRPO(RewardGradient):
    """scale * relu(margin - reward) of `direct_align` at one level of the schedule, drawn a sample.

    num_first_steps: the level is that of one of the first so many steps; None takes any.
    positive_words, negative_words: the reward is that of "positive_words. prompt" minus that of "negative_words.
        prompt", which leaves of a scorer what the words mean to it. Both or neither; a scorer must read the prompt.
    Everything else: see `RewardGradient`; the penalty is taken at the stored latent of the same step.
    Raises ConfigError for words of one side alone.
    """

    trained_rows: ClassVar[str | int | None] = 1

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        num_first_steps: PositiveInt | None = None,
        positive_words: str | None = None,
        negative_words: str | None = None,
        **options: Any,  # Any: the keywords of RewardGradient
    ) -> None:
        super().__init__(pipeline, policies, **options)
        if bool(positive_words) != bool(negative_words):
            raise ConfigError(
                f"algorithm.positive_words = {positive_words!r} and algorithm.negative_words = {negative_words!r}: a "
                "relative reward needs both. Give the other one, or neither."
            )
        self.num_first_steps = num_first_steps
        self.words = (positive_words, negative_words) if positive_words and negative_words else None

    def clean_latents(self, steps: Denoising, keys: list[str]) -> Tensor:
        """The samples' clean latents after one step of the model from the level drawn for each."""
        step_B = self.gradient_steps(steps, keys)[:, 0]
        x0 = steps.latents[:, -1]
        noise = keyed_normal([f"{key}::noise" for key in keys], self.seed, tuple(x0.shape[1:])).to(x0)
        sigma_B, sigma_next_B = steps.sigmas[step_B], steps.sigmas[step_B + 1]
        v = steps.velocity(interpolate(x0, noise, sigma_B), steps.samples, step_B)
        return direct_align(x0, v, velocity_target(x0, noise), sigma_B, sigma_next_B)

    def gradient_steps(self, steps: Denoising, keys: list[str]) -> Tensor:
        """One step per sample, [B, 1]. Raises ConfigError if there are fewer than `num_first_steps`."""
        num_steps = steps.num_steps if self.num_first_steps is None else self.num_first_steps
        if num_steps > steps.num_steps:
            raise ConfigError(
                f"algorithm.num_first_steps = {num_steps} exceeds the {steps.num_steps} steps of the rollout. Lower it "
                "or raise sampling.num_inference_steps."
            )
        draw_B = keyed_uniform([f"{key}::step" for key in keys], self.seed, ()).to(steps.latents.device)
        return (draw_B * num_steps).long()[:, None]

    def scored(self, reward: DifferentiableReward, request: RewardRequest) -> Tensor:
        """The reward [B], or the difference that the words make."""
        if self.words is None:
            return super().scored(reward, request)
        positive, negative = (super(SRPO, self).scored(reward, with_words(request, words)) for words in self.words)
        return positive - negative


def with_words(request: RewardRequest, words: str) -> RewardRequest:
    """The request with "words. prompt" instead of every prompt. Raises ContractError if it has none."""
    if "text" not in request.primitives:
        raise ContractError(f"words need prompts; this request has the inputs {sorted(request.primitives)}")
    texts = Texts(texts=[f"{words}. {prompt}" for prompt in request.prompts])
    return request.replace(primitives={**request.primitives, "text": texts})
