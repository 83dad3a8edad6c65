"""Base classes of engines: default abilities, and methods that by default do nothing or raise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from unirl.rollout.checks import diffusion_params
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Primitive, Videos
from unirl.types.protocols.engines import ChunkListener
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams

MediaBits = Literal[8, 32]
"""8 keeps media as uint8 until they are scored, a quarter of the memory; rewards then see pixels rounded to 1 / 255. 32
keeps float32."""


class BaseRolloutEngine(ABC):
    """Base of the engines. Implements unirl.types.protocols.engines.RolloutEngine, all but `generate`.

    The class attributes say what an engine can do and needs. `trainer check` reads them without importing the engine,
    so a class that differs from a default sets the attribute to a literal.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.rules"
    """Module with the engine's recipe rules, see `unirl.types.recipe`. Those that a subclass names are added to
    these."""
    has_trainer_logp: ClassVar[bool] = False
    """True if log-probs come from the modules that are trained, so that a replay in float32 gives the same values."""
    logp_gap_float32: ClassVar[float | None] = None
    """Measured bound of |log-prob - replayed log-prob| in float32, in nats per latent element, for diffusion engines
    with their own weights; None if not measured."""
    gives_logp: ClassVar[bool] = True
    """True if samples come with log-probs under the distribution they were drawn from."""
    announces_chunks: ClassVar[bool] = False
    """True if samples are available before the response is complete (`announce_to`)."""
    can_abort: ClassVar[bool] = False
    """True if a running `generate` can be ended early (`abort`)."""
    can_resume: ClassVar[bool] = False
    """True if `generate` continues the samples that `abort` ended early (`RolloutReq.begun`)."""
    shares_memory: ClassVar[bool] = False
    """True if its process loads one bucket of a push after the other, see `SharesMemory`."""
    can_sleep: ClassVar[bool] = False
    """True if `sleep` frees device memory."""
    sleep_option: ClassVar[str | None] = None
    """Constructor keyword that must be set for `sleep` to free anything; None if no keyword is needed."""
    has_own_weights: ClassVar[bool] = False
    """True if it samples with a copy of the weights, which receives pushes of the policy (WeightReceiver of
    unirl.types.protocols.engines). The recipe then needs a `sync` section."""
    device_share: ClassVar[float | None] = None
    """Share of a device that it reserves for weights, keys and values and its computations, if `share_options` do not
    say otherwise; None if it takes what it needs."""
    share_options: ClassVar[tuple[str, ...]] = ()
    """Names of that option in `engine_args`."""
    adapter_option: ClassVar[str | None] = None
    """Constructor keyword that chooses pushes of adapters instead of whole weights; None if both are accepted at any
    time."""
    has_own_model: ClassVar[bool] = False
    """True if its `pipeline` is built over a separate bundle, passed as `bundle`, and not over the modules that are
    trained."""
    gives_latents: ClassVar[bool] = True
    """Diffusion only: True if it returns the latents around stochastic steps, which replay needs."""
    takes_initial_latents: ClassVar[bool] = True
    """Diffusion only: True if it starts from the noise that the request describes, so that samples can share it."""
    takes_step_subsets: ClassVar[bool] = True
    """Diffusion only: True if a subset of the steps can be stochastic."""
    shares_steps: ClassVar[bool] = False
    """Diffusion only: True if samples can share their first steps (`unirl.types.branching`)."""
    takes_own_steps: ClassVar[bool] = False
    """Diffusion only: True if samples can have one stochastic step each (`RolloutReq.own_steps`)."""
    keeps_regions: ClassVar[bool] = False
    """Diffusion only: True if samples keep what the pipeline notes of its attention (`LatentSegment.regions`)."""
    takes_media: ClassVar[bool] = False
    """True if the model receives the images and videos of a request."""
    takes_media_of: ClassVar[tuple[str, ...] | None] = None
    """Class names of the bundles whose media the engine takes; None if it takes those of all that read some."""
    takes_audio: ClassVar[bool] = False
    """True if the model receives the audio of a request."""
    takes_sizes: ClassVar[bool] = False
    """Diffusion only: True if a stage may draw each image at a different size."""
    draws_by_tokens: ClassVar[bool] = False
    """True if its samples are images that a model draws token by token."""
    plays_episodes: ClassVar[bool] = False
    """True if it plays episodes in an environment."""
    needs_moves: ClassVar[bool] = False
    """True if rows of data must bring moves, which it plays instead of a policy's."""
    needs_texts: ClassVar[bool] = False
    """True if it takes conversations from the data (`unirl.types.messages`) instead of sampling them."""
    needs_images: ClassVar[bool] = False
    """True if it takes images from the data (`unirl.types.preference`) instead of sampling them."""

    @abstractmethod
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Sample one response for a request. policy: name of a kept copy of the weights; None is the current policy."""

    def announce_to(self, listener: ChunkListener) -> None:
        """Call `listener` with each chunk of every later response as soon as it is ready, in the order of the request.

        Raises ConfigError if the engine returns whole responses only.
        """
        raise ConfigError(
            f"{type(self).__name__} makes whole responses only, so nothing can be scored while it generates. "
            "Set reward.is_async: false."
        )

    @distributed(Dispatch.BROADCAST, Collect.FIRST, is_control=True)
    def abort(self) -> None:
        """End the `generate` that runs in another thread. Raises ConfigError if the engine cannot end one early."""
        raise ConfigError(f"{type(self).__name__} cannot end a rollout early; it finishes what it began.")

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)  # noqa: B027 (engines that take any prompt check nothing)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError if a prompt cannot be sampled from. Does not generate."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)  # noqa: B027 (engines that hold no memory of their own do nothing)
    def sleep(self) -> None:
        """Free device memory."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)  # noqa: B027
    def wake_up(self) -> None:
        """Restore device memory."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)  # noqa: B027
    def shutdown(self) -> None:
        """Stop what the engine started."""

    def close(self) -> None:
        """Shut down; called when the engine's worker ends."""
        self.shutdown()


class BaseDiffusionEngine(BaseRolloutEngine):
    """Base of the engines of diffusion models. Implements unirl.types.protocols.engines.DiffusionRolloutEngine."""

    @abstractmethod
    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """Sigmas, latent shape and kernel for these parameters."""

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def encodes_ahead(self) -> bool:
        """True if the driver must call `encode_ahead` with every prompt of the run, and then `drop_text_encoders`."""
        return False

    @distributed(Dispatch.BROADCAST, Collect.FIRST)  # noqa: B027 (most engines keep nothing of prompts)
    def encode_ahead(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> None:
        """Encode and cache some prompts of the run with their images, as sampling will need them."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)  # noqa: B027
    def drop_text_encoders(self) -> None:
        """Free the text encoders."""


class PipelineEngine(BaseDiffusionEngine):
    """Base of engines that plan and encode prompts with a pipeline in this process."""

    _pipeline: DiffusionPipeline
    _drops_text_encoders: bool
    _media_bits: MediaBits = 32

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """Sigmas, latent shape and kernel for these parameters."""
        return DiffusionPlan(
            self._pipeline.sigmas(params), self._pipeline.latent_shape(params), self._pipeline.strategy_name
        )

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def encodes_ahead(self) -> bool:
        """True if the recipe sets `drop_text_encoders`."""
        return self._drops_text_encoders

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def encode_ahead(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> None:
        """Encode the texts of some prompts, with the images that the text encoders read."""
        self._pipeline.encode_texts(primitives, self._encoded_for(params))

    def _encoded_for(self, params: DiffusionSamplingParams) -> DiffusionSamplingParams:
        """Parameters that have all texts encoded which samples of `params` need."""
        return params

    def _encode_first(self, batches: Sequence[RolloutReq]) -> None:
        """If text encoders are offloaded after encoding, encode all prompts of a rollout before sampling starts.

        The embedding cache keeps the results.
        """
        if not self._pipeline.encoders_rest:
            return
        with self._pipeline.visiting_encoders():
            for batch in batches:
                self._pipeline.encode_texts(batch.primitives, self._encoded_for(diffusion_params(batch)))

    def _kept(self, media: Images | Videos | None) -> Images | Videos | None:
        """Media in the form that the track keeps."""
        return media.in_bytes() if media is not None and self._media_bits == 8 else media

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def drop_text_encoders(self) -> None:
        """Free this process's text encoders. Raises ConfigError if the embedding cache does not hold every result."""
        self._pipeline.drop_text_encoders()
