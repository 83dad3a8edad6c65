"""LTX-2 as the pipeline that recipes name."""

from __future__ import annotations

from typing import ClassVar, cast

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.ltx2.adapter import LTX2Adapter
from unirl.types.sampling import DiffusionSamplingParams


class LTX2Pipeline(DiffusersPipeline):
    """LTX-2, video with sound, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = LTX2Adapter
    latent_media: ClassVar[tuple[str, ...]] = ("video", "audio")

    def media_slices(self, params: DiffusionSamplingParams) -> dict[str, slice]:
        """Where each of `latent_media` lies along dimension 1 of latents."""
        adapter = cast(LTX2Adapter, self.adapter)  # what adapter_class makes
        return dict(zip(self.latent_media, adapter.part_slices(params), strict=True))
