"""LTX-2 as the pipeline that recipes name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.ltx2.adapter import LTX2Adapter
from unirl.models.ltx2.audio_gradient import scale_audio_gradient
from unirl.models.ltx2.bundle import LTX2Bundle
from unirl.models.ltx2.rules import Span, span_problem
from unirl.sde.kernels import SDEStrategy
from unirl.sde.schedule import Convention, SigmaSchedule
from unirl.types.bounds import bounded
from unirl.types.errors import ConfigError
from unirl.types.sampling import DiffusionSamplingParams


@bounded("pipeline")
class LTX2Pipeline(DiffusersPipeline):
    """LTX-2, video with sound, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`.

    audio_gradient: spans of blocks as [first, last, scale]: of the gradient that the video's stream sends back there to
        the audio tokens it attends to, `scale` in [0, 1] is kept. Blocks in no span keep all of it.
    Raises ConfigError for spans that the model does not have.
    """

    adapter_class = LTX2Adapter
    recipe_rules: ClassVar[str] = "unirl.models.ltx2.rules"
    latent_media: ClassVar[tuple[str, ...]] = ("video", "audio")

    def __init__(
        self,
        bundle: LTX2Bundle,
        strategy: SDEStrategy,
        schedule: SigmaSchedule | Convention | None = None,
        *,
        audio_gradient: Sequence[Span] | None = None,
        **options: Any,  # Any: the keywords of DiffusersPipeline
    ) -> None:
        super().__init__(bundle, strategy, schedule, **options)
        blocks = bundle.transformer.transformer_blocks
        problem = span_problem(audio_gradient or (), len(blocks))
        if problem is not None:
            raise ConfigError(f"pipeline.audio_gradient {problem}.")
        scale_audio_gradient(blocks, audio_gradient or ())

    def media_slices(self, params: DiffusionSamplingParams) -> dict[str, slice]:
        """Where each of `latent_media` lies along dimension 1 of latents."""
        adapter = cast(LTX2Adapter, self.adapter)  # what adapter_class makes
        return dict(zip(self.latent_media, adapter.part_slices(params), strict=True))
