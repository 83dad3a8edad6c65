"""A diffusers family as the pipeline that recipes name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast, get_args

from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.embedding_cache import EmbeddingCache
from unirl.models.pipeline import DiffusionPipeline
from unirl.sde.kernels import SDEStrategy
from unirl.sde.schedule import Convention, Schedule, SigmaSchedule
from unirl.sde.timesteps import Spacing, TimestepSchedule
from unirl.types.bounds import PositiveInt, bounded


@bounded("pipeline")
class DiffusersPipeline(DiffusionPipeline):
    """Base of the pipelines of diffusers families, see `unirl.models.pipeline.DiffusionPipeline`.

    schedule: a SigmaSchedule (TimestepSchedule for SDXL and CogVideoX), or the name of a convention of
    `unirl.sde.schedule` (of a spacing of `unirl.sde.timesteps`) with the checkpoint's own constants. None is the one of
    the family's stock pipeline, except where the family says otherwise.
    decode_batch_size, encode_batch_size, embedding_cache: see `TextConditionedAdapter`.
    forward_batch_size: see `DiffusionPipeline`.
    """

    adapter_class: ClassVar[type[TextConditionedAdapter[Any]]]  # Any: of the family's own bundle
    """What answers for the family."""

    def __init__(
        self,
        bundle: DiffusersBundle,
        strategy: SDEStrategy,
        schedule: SigmaSchedule | TimestepSchedule | Convention | Spacing | None = None,
        *,
        decode_batch_size: PositiveInt = 8,
        encode_batch_size: PositiveInt = 32,
        forward_batch_size: PositiveInt | None = None,
        embedding_cache: EmbeddingCache | str | Path | None = None,
    ) -> None:
        adapter = self.adapter_class(
            bundle,
            decode_batch_size=decode_batch_size,
            encode_batch_size=encode_batch_size,
            embedding_cache=embedding_cache,
        )
        levels: Schedule
        if isinstance(schedule, SigmaSchedule | TimestepSchedule):
            levels = schedule
        elif schedule in get_args(Spacing):
            levels = adapter.spaced(cast(Spacing, schedule))
        else:
            levels = adapter.schedule(cast(Convention | None, schedule))
        super().__init__(adapter, strategy, levels, forward_batch_size=forward_batch_size)
