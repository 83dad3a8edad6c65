"""HunyuanImage 2.1 as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.hunyuan_image.adapter import HunyuanImageAdapter


class HunyuanImagePipeline(DiffusersPipeline):
    """HunyuanImage 2.1, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = HunyuanImageAdapter
