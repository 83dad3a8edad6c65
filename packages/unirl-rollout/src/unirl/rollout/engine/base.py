"""What engines share: the plan of a geometry, and sleep and wake that default to nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from unirl.types.errors import ConfigError
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams


@dataclass(frozen=True)
class DiffusionPlan:
    """What the driver pins on every request of one geometry."""

    sigmas: Tensor
    """[T+1] float32."""
    latent_shape: tuple[int, ...]
    """Shape of ONE latent."""
    kernel: str
    """Name of the kernel of the stochastic steps."""


ChunkListener = Callable[[RolloutResp, RolloutReq], None]
"""Called with samples that are ready and the part of the request that they answer."""


class BaseRolloutEngine(ABC):
    """Base of the engines: generates responses; frees and restores device memory between phases.

    The class attributes say what an engine can do and needs. `trainer check` reads them without importing the engine,
    so a class that differs from a default sets the attribute to a literal.
    """

    has_trainer_logp: ClassVar[bool] = False
    """Whether its log-probs are computed by the very modules that train, so that in float32 a replay gives the same."""
    announces_chunks: ClassVar[bool] = False
    """Whether samples can be had before the whole response is there (`announce_to`)."""
    has_own_weights: ClassVar[bool] = False
    """Whether it samples with a copy of the weights that the policy must be pushed to (a WeightReceiver of
    unirl.types.protocols), so that the recipe needs a `sync` section."""
    has_own_model: ClassVar[bool] = False
    """Whether its `pipeline` must be built over a bundle for this engine alone, which it takes as `bundle`; the modules
    that train are not touched."""
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

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)  # noqa: B027 (engines that take any prompt check nothing)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError where a prompt cannot be sampled from. Generates nothing."""

    def sleep(self) -> None:  # noqa: B027 (engines that hold no memory of their own do nothing)
        """Free device memory."""

    def wake_up(self) -> None:  # noqa: B027
        """Restore device memory."""

    def shutdown(self) -> None:  # noqa: B027
        """Stop what the engine started."""

    def close(self) -> None:
        """Shut down with the worker that the engine is part of."""
        self.shutdown()


class DiffusionRolloutEngine(BaseRolloutEngine):
    """Base of the engines of diffusion models, which tell the driver what to pin on a request."""

    @abstractmethod
    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """Sigmas, latent shape and kernel for these parameters."""
