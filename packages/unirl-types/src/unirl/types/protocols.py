"""What one package needs of another. Implementations live in the packages; recipes join them.

Legend: B samples, R rows (a row is one (sample, step) pair), S stochastic steps, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from unirl.types.conditions import Condition
from unirl.types.media import Images, Primitive, Videos
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

Conditions = Mapping[str, Condition]


class TransitionStats(Protocol):
    """Log-prob and Gaussian of some transitions under the current weights."""

    @property
    def logp_R(self) -> Tensor:
        """[R] float32, with gradients."""
        ...

    @property
    def mean(self) -> Tensor:
        """[R, ...] float32 means of the transitions, with gradients."""
        ...

    @property
    def std_R(self) -> Tensor:
        """[R] float32 standard deviations that the kernel drew with."""
        ...

    @property
    def q_R(self) -> Tensor | None:
        """[R] float32 diffusion coefficient, std / sqrt(-dt), or None for a kernel that has none."""
        ...


class DiffusionPipeline(Protocol):
    """A diffusion model that can sample a trajectory and replay rows of it."""

    @property
    def strategy_name(self) -> str:
        """Name of the kernel of the stochastic steps."""
        ...

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """Shape of ONE latent. Raises ConfigError where the geometry does not divide."""
        ...

    def sigmas(self, params: DiffusionSamplingParams) -> Tensor:
        """[T+1] float32 noise levels of the model's own schedule."""
        ...

    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """Conditions of B samples."""
        ...

    def diffuse(
        self,
        conditions: Conditions,
        initial_latents: Tensor,
        sigmas: Tensor,
        params: DiffusionSamplingParams,
        *,
        noise_keys: Sequence[str],
        start_keys: Sequence[str] | None = None,
    ) -> LatentSegment:
        """Sample B trajectories from `initial_latents` [B, ...]. `noise_keys` [B] seed the per-step noise.

        start_keys: equal ids mark samples with equal initial latents and conditions, whose common steps may be shared.
        """
        ...

    def decode(self, latents: Tensor) -> Images | Videos:
        """Media of clean latents [B, ...]."""
        ...

    def encode_media(self, media: Images | Videos) -> Tensor:
        """Clean latents [B, ...] of media, the inverse of `decode`, without gradient."""
        ...

    def replay(
        self,
        conditions: Conditions,
        segment: LatentSegment,
        sample_R: Tensor,
        step_R: Tensor,
        params: DiffusionSamplingParams,
    ) -> TransitionStats:
        """Log-probs of stored transitions under the current weights, one forward over all R rows, with gradients."""
        ...

    def velocity(
        self, conditions: Conditions, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, params: DiffusionSamplingParams
    ) -> Tensor:
        """Velocity at R rows; `conditions` has one row a row. Guidance as in `params`."""
        ...

    def drop_text_encoders(self) -> None:
        """Free the text encoders; prompts that were encoded before still encode."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        ...


class PolicyStore(Protocol):
    """Named copies of the trainable parameters, and ways to run the model with them for a while."""

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps taken so far; also the policy's version."""
        ...

    def keep_policy(self, name: str) -> None:
        """Keep a copy of the current trainable parameters under `name`."""
        ...

    def update_policy(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * current."""
        ...

    def using_policy(self, name: str) -> AbstractContextManager[None]:
        """Inside, the model computes with the copy's values. Never touches requires_grad."""
        ...

    def reference_policy(self) -> AbstractContextManager[None]:
        """Inside, the model computes as before training (adapter disabled, or a frozen copy)."""
        ...


class ModelBundle(Protocol):
    """The bare modules of a model and what training needs to know of them."""

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """Class names of the blocks that are sharded, checkpointed and compiled one by one."""
        ...

    @property
    def lora_target_modules(self) -> tuple[str, ...]:
        """Module name suffixes that LoRA adapts when a recipe names none."""
        ...

    def trainable_modules(self) -> dict[str, nn.Module]:
        """Component name -> module that trains. More than one where the model has several experts."""
        ...

    def export_lora(
        self,
        folder: str,
        lora_state: Mapping[str, Mapping[str, Tensor]],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
    ) -> None:
        """Write LoRA weights where the model's usual pipeline loads them. `lora_state`: component -> peft state."""
        ...

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write the components with merged weights by `save_pretrained`. `state`: component -> full state."""
        ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates responses. Sleep and wake free and restore device memory; trainside engines do nothing there."""

    def generate(self, req: RolloutReq) -> RolloutResp:
        """One sample for every row of the request, in its order."""
        ...

    def sleep(self) -> None:
        """Give device memory back until `wake_up`."""
        ...

    def wake_up(self) -> None:
        """Be ready to generate again."""
        ...

    def shutdown(self) -> None:
        """Stop for good and release everything. Safe to call twice."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Scores a batch of samples."""

    name: str

    def score(self, request: RewardRequest) -> RewardResponse:
        """One finite reward a sample, or NaN with success False and an error text."""
        ...


@runtime_checkable
class DifferentiableReward(Protocol):
    """A reward with gradients, in the process that trains."""

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        """Rewards float32 [B] with gradients to the pixels of the request's images."""
        ...
