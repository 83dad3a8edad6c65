"""What engines share: abilities with their defaults, and methods that default to nothing or to a refusal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from unirl.rollout.checks import diffusion_params
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive
from unirl.types.protocols.engines import ChunkListener
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams


class BaseRolloutEngine(ABC):
    """Base of the engines. Implements unirl.types.protocols.engines.RolloutEngine, all but `generate`.

    The class attributes say what an engine can do and needs. `trainer check` reads them without importing the engine,
    so a class that differs from a default sets the attribute to a literal.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.rules"
    """Module with the rules of recipes, see `unirl.types.recipe`. A subclass that names its own adds to these."""
    has_trainer_logp: ClassVar[bool] = False
    """Whether its log-probs are computed by the very modules that train, so that in float32 a replay gives the same."""
    logp_gap_float32: ClassVar[float | None] = None
    """Of diffusion, for an engine with weights of its own: bound of |log-prob - a replay's| in float32, in nats per
    latent element, as measured; None where nobody has."""
    gives_logp: ClassVar[bool] = True
    """Whether its samples come with log-probs of the distribution that they were drawn from."""
    announces_chunks: ClassVar[bool] = False
    """Whether samples can be had before the whole response is there (`announce_to`)."""
    can_abort: ClassVar[bool] = False
    """Whether a `generate` can be ended early (`abort`)."""
    can_sleep: ClassVar[bool] = False
    """Whether `sleep` gives device memory back."""
    sleep_option: ClassVar[str | None] = None
    """Keyword of its constructor without which `sleep` frees nothing; None where there is none."""
    has_own_weights: ClassVar[bool] = False
    """Whether it samples with a copy of the weights that the policy must be pushed to (a WeightReceiver of
    unirl.types.protocols.engines), so that the recipe needs a `sync` section."""
    adapter_option: ClassVar[str | None] = None
    """Keyword of its constructor that says whether adapters are pushed instead of whole weights; None where either
    may come at any time."""
    takes_partial_pushes: ClassVar[bool] = False
    """Whether a push of the whole model may leave out tensors that the engine has, which it then compares with their
    checksums."""
    has_own_model: ClassVar[bool] = False
    """Whether its `pipeline` must be built over a bundle for this engine alone, which it takes as `bundle`; the modules
    that train are not touched."""
    gives_latents: ClassVar[bool] = True
    """Of diffusion: whether it returns the latents around stochastic steps, which replay needs."""
    takes_initial_latents: ClassVar[bool] = True
    """Of diffusion: whether it starts from the noise that a request describes, so that samples can share it."""
    takes_step_subsets: ClassVar[bool] = True
    """Of diffusion: whether some steps can be stochastic and the others not."""
    shares_steps: ClassVar[bool] = False
    """Of diffusion: whether samples can share their first steps (`unirl.types.branching`)."""
    takes_media: ClassVar[bool] = False
    """Whether images and videos of a request reach the model."""
    takes_audio: ClassVar[bool] = False
    """Whether sounds of a request reach the model."""
    takes_sizes: ClassVar[bool] = False
    """Of diffusion: whether a stage may draw every image in a size of its own."""
    needs_images: ClassVar[bool] = False
    """Whether it takes images that the data brings (`unirl.types.preference`) in the place of samples."""

    @abstractmethod
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One response for one request; `policy` names a kept copy of the weights."""

    def announce_to(self, listener: ChunkListener) -> None:
        """From now on call `listener` with each chunk of a response as soon as it is made, in the order of the request.

        Raises ConfigError in an engine that makes whole responses only.
        """
        raise ConfigError(
            f"{type(self).__name__} makes whole responses only, so nothing can be scored while it generates. "
            "Set reward.is_async: false."
        )

    def abort(self) -> None:
        """End the `generate` that runs in another thread. Raises ConfigError in an engine that always finishes."""
        raise ConfigError(f"{type(self).__name__} cannot end a rollout early; it finishes what it began.")

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)  # noqa: B027 (engines that take any prompt check nothing)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError where a prompt cannot be sampled from. Generates nothing."""

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
        """Shut down with the worker that the engine is part of."""
        self.shutdown()


class BaseDiffusionEngine(BaseRolloutEngine):
    """Base of the engines of diffusion models. Implements unirl.types.protocols.engines.DiffusionRolloutEngine."""

    @abstractmethod
    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """Sigmas, latent shape and kernel for these parameters."""

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def encodes_ahead(self) -> bool:
        """Whether `encode_ahead` is to be called with every prompt of the run, and then `drop_text_encoders`."""
        return False

    @distributed(Dispatch.BROADCAST, Collect.FIRST)  # noqa: B027 (most engines keep nothing of prompts)
    def encode_ahead(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> None:
        """Encode some prompts of the run, with what they show, as they will be sampled."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)  # noqa: B027
    def drop_text_encoders(self) -> None:
        """Free the text encoders."""


class PipelineEngine(BaseDiffusionEngine):
    """An engine whose plan and prompts are those of a pipeline in this process."""

    _pipeline: DiffusionPipeline
    _drops_text_encoders: bool

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """Sigmas, latent shape and kernel for these parameters."""
        return DiffusionPlan(
            self._pipeline.sigmas(params), self._pipeline.latent_shape(params), self._pipeline.strategy_name
        )

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def encodes_ahead(self) -> bool:
        """Whether the recipe asks for it."""
        return self._drops_text_encoders

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def encode_ahead(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> None:
        """Encode the texts of some prompts, with the images that their encoders see."""
        self._pipeline.encode_texts(primitives, params)

    def _encode_first(self, batches: Sequence[RolloutReq]) -> None:
        """Encode the prompts of a rollout before anything is sampled, where the encoders leave the device then.

        The embedding cache keeps what was made of them.
        """
        if not self._pipeline.encoders_rest:
            return
        with self._pipeline.visiting_encoders():
            for batch in batches:
                self._pipeline.encode_texts(batch.primitives, diffusion_params(batch))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def drop_text_encoders(self) -> None:
        """Free this process's text encoders. Raises ConfigError where not all that they made is kept."""
        self._pipeline.drop_text_encoders()
