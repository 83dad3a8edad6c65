"""Stages of a rollout: which engine makes each track, what it grows from, and what it reads of the tracks above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from unirl.types.errors import ContractError
from unirl.types.media import Primitive
from unirl.types.protocols.engines import RolloutEngine
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import StagedSamplingParams

Inputs = Mapping[str, Primitive]
"""By slot, one entry per row."""
Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True, kw_only=True)
class Above:
    """What a stage can read, one row per sample of the track that it grows from."""

    asked: Inputs
    """What the user asked for."""
    tracks: Mapping[str, RolloutTrack]
    """The tracks above, the parent first; rows of the others are repeated to those of the parent."""
    pipelines: Mapping[str, Any]  # Any: the pipelines of all stages, by track
    """What made them."""

    @property
    def parent(self) -> RolloutTrack:
        """The track that the stage grows from."""
        return next(iter(self.tracks.values()))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a stage reads."""

    inputs: Inputs
    """One row per sample of the parent, or per row of the request."""
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    """[B] float32 each: what was counted of each sample of the parent, for the metrics."""
    sizes: Sequence[Size | None] | None = None
    """Height and width of each row's image; None stands for those of the sampling parameters, of one row or of all."""
    start: Tensor | None = None
    """[B, ...] clean latents that the stage begins from, mixed with its noise at its first noise level; None: noise."""


def staged_params(req: RolloutReq) -> StagedSamplingParams:
    """How the stages of a request are sampled. Raises ContractError for a request of one stage."""
    params = req.sampling_params
    if not isinstance(params, StagedSamplingParams):
        raise ContractError(f"this engine has several stages, the request has {type(params).__name__}")
    return params


class StageReader(Protocol):
    """How a stage reads. `unirl.rollout.stages.reading` has the usual ones."""

    def of_prompt(self, asked: Inputs) -> Reading:
        """The inputs of a stage that grows from the request."""
        ...

    def of_tracks(self, above: Above) -> Reading:
        """The inputs of a stage that grows from a track."""
        ...

    def possible_sizes(self, parent: Any) -> Sequence[Size]:  # Any: the pipeline of the parent
        """Every size that `Reading.sizes` may hold; empty where images have those of the sampling parameters."""
        ...

    def levels(self, sigmas: Tensor) -> Tensor:
        """[T+1] noise levels of the stage, from those of its schedule."""
        ...


@dataclass(frozen=True, kw_only=True)
class BuiltStage:
    """One stage in one worker."""

    engine: RolloutEngine
    """Stages of one policy may share it; what it calls its track is not read."""
    pipeline: Any  # Any: a pipeline of tokens or of latents
    reader: StageReader
    policy: str
    """Name of the policy that it samples from."""
    grows_from: str | None = None
    """The parent track; None: the request."""
    parent_pipeline: Any = None  # Any: as `pipeline`
    """Pipeline of the parent track, where that stage is in another worker and its policy's model is in this one too."""
    can_resume: bool = False
    """True if the engine ends early what it makes, and continues it (`BaseRolloutEngine.can_resume`)."""
