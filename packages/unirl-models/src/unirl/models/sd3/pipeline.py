"""SD3 as the pipeline that recipes name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from unirl.models.embedding_cache import EmbeddingCache
from unirl.models.pipeline import DiffusionPipeline
from unirl.models.sd3.adapter import SD3Adapter
from unirl.models.sd3.bundle import SD3Bundle
from unirl.sde.kernels import SDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.types.bounds import PositiveInt, bounded


@bounded("pipeline")
class SD3Pipeline(DiffusionPipeline):
    """Stable Diffusion 3 and 3.5, see `unirl.models.pipeline.DiffusionPipeline`.

    schedule: a SigmaSchedule, or the name of a static convention ("linear", "diffusers") with the checkpoint's own
    shift. None is "linear", or "dynamic" where the checkpoint's scheduler says so. Published SD3 runs used both static
    conventions, see `unirl.sde.schedule`: name the one to reproduce.
    decode_batch_size, encode_batch_size, embedding_cache: see `SD3Adapter`. forward_batch_size: see `DiffusionStage`.
    """

    def __init__(
        self,
        bundle: SD3Bundle,
        strategy: SDEStrategy,
        schedule: SigmaSchedule | Literal["linear", "diffusers"] | None = None,
        *,
        decode_batch_size: PositiveInt = 8,
        encode_batch_size: PositiveInt = 32,
        forward_batch_size: PositiveInt | None = None,
        embedding_cache: EmbeddingCache | str | Path | None = None,
    ) -> None:
        adapter = SD3Adapter(
            bundle,
            decode_batch_size=decode_batch_size,
            encode_batch_size=encode_batch_size,
            embedding_cache=embedding_cache,
        )
        if not isinstance(schedule, SigmaSchedule):
            schedule = SigmaSchedule.from_scheduler_config(bundle.scheduler_config, schedule)
        super().__init__(adapter, strategy, schedule, forward_batch_size=forward_batch_size)
