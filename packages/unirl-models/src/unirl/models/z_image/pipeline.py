"""Z-Image as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.z_image.adapter import ZImageAdapter


class ZImagePipeline(DiffusersPipeline):
    """Z-Image, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = ZImageAdapter
