"""The object that engines and trainers hold: an adapter, a kernel and a sigma schedule under one roof.

Implements `unirl.types.protocols.models.DiffusionPipeline`. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from torch import Tensor

from unirl.models.adapter import DiffusionAdapter
from unirl.models.diffusion import DiffusionStage, ReplayedTransitions
from unirl.models.evaluation_mode import evaluating
from unirl.sde.kernels import SDEStrategy
from unirl.sde.schedule import Schedule
from unirl.types.conditions import Condition
from unirl.types.media import Images, Primitive, Videos
from unirl.types.protocols.models import Conditions, ModelBundle
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


class DiffusionPipeline:
    """A diffusion model that can sample a trajectory and replay rows of it.

    strategy: the kernel of the stochastic steps. Required: a default that differs from the engine's would make replay
    silently wrong.
    schedule: the noise levels; `sigmas` evaluates it once per request, everyone else uses the result verbatim.
    forward_batch_size: most rows in one forward of the model, before guidance doubles them; None sets no limit.
    """

    recipe_rules: ClassVar[str] = "unirl.models.pipeline_rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""
    takes_any_sigma: ClassVar[bool] = True
    """False for a model that knows the levels of its own timesteps alone."""

    def __init__(
        self,
        adapter: DiffusionAdapter,
        strategy: SDEStrategy,
        schedule: Schedule,
        *,
        forward_batch_size: int | None = None,
    ) -> None:
        self.adapter = adapter
        self.schedule = schedule
        self.diffusion = DiffusionStage(adapter, strategy, forward_batch_size=forward_batch_size)

    @property
    def bundle(self) -> ModelBundle:
        """The model's modules and what training needs to know of them."""
        return self.adapter.bundle

    @property
    def strategy(self) -> SDEStrategy:
        """The kernel of the stochastic steps."""
        return self.diffusion.strategy

    @property
    def strategy_name(self) -> str:
        """Name of that kernel."""
        return self.strategy.name

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """Shape of ONE latent. Raises ConfigError if the geometry does not divide."""
        return self.adapter.latent_shape(params)

    def sigmas(self, params: DiffusionSamplingParams) -> Tensor:
        """[T + 1] float32 noise levels of the model's schedule for this number of steps and geometry."""
        return self.schedule.sigmas(params.num_inference_steps, self.adapter.image_seq_len(params))

    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """Conditions of B samples, without gradient."""
        return self.adapter.encode(primitives, params)

    def diffuse(
        self,
        conditions: Conditions,
        initial_latents: Tensor,
        sigmas: Tensor,
        params: DiffusionSamplingParams,
        *,
        noise_keys: Sequence[str],
        start_keys: Sequence[str] | None = None,
        keep_means: bool = False,
    ) -> LatentSegment:
        """Trajectories of B samples, see `DiffusionStage.diffuse`. Call inside `evaluating()`."""
        return self.diffusion.diffuse(
            conditions,
            initial_latents,
            sigmas,
            params,
            noise_keys=noise_keys,
            start_keys=start_keys,
            keep_means=keep_means,
        )

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images | Videos:
        """Media of clean latents [B, ...] that were sampled with `params`, float32 in [0, 1]."""
        return self.adapter.decode(latents, params)

    def encode_media(self, media: Images | Videos) -> Tensor:
        """Clean latents [B, ...] of media, float32, without gradient, see `DiffusionAdapter.encode_media`."""
        return self.adapter.encode_media(media)

    def replay(
        self,
        conditions: Conditions,
        segment: LatentSegment,
        sample_R: Tensor,
        step_R: Tensor,
        params: DiffusionSamplingParams,
    ) -> ReplayedTransitions:
        """Log-probs of stored transitions under the present weights, see `DiffusionStage.replay`."""
        return self.diffusion.replay(conditions, segment, sample_R, step_R, params)

    def step_std(self, segment: LatentSegment) -> Tensor:
        """[S] standard deviation of the noise of each stochastic step, see `DiffusionStage.step_std`."""
        return self.diffusion.step_std(segment)

    def velocity(
        self, conditions: Conditions, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, params: DiffusionSamplingParams
    ) -> Tensor:
        """Velocity [R, ...] float32 at R rows; `conditions` has one row per row. Guidance as in `params`."""
        return self.diffusion.velocity(conditions, params)(x_R, sigma_R, step_R)

    def encode_texts(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """Those of the conditions that text encoders make, which are then remembered. See `DiffusionAdapter`."""
        return self.adapter.encode_texts(primitives, params)

    def cut_tokens(self, texts: Sequence[str], params: DiffusionSamplingParams) -> list[int]:
        """Tokens of each text that no encoder reads, see `DiffusionAdapter`."""
        return self.adapter.cut_tokens(texts, params)

    @property
    def encoders_rest(self) -> bool:
        """True if text encoders rest in host memory between rollouts."""
        return self.adapter.encoders_rest

    def visiting_encoders(self) -> AbstractContextManager[None]:
        """Text encoders that rest leave the device at its end. See `DiffusionAdapter`."""
        return self.adapter.visiting_encoders()

    def drop_text_encoders(self) -> None:
        """Free the text encoders; prompts that were encoded before still encode. See `DiffusionAdapter`."""
        self.adapter.drop_text_encoders()

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients; each submodule gets its own mode back afterwards."""
        return evaluating(self.bundle)
