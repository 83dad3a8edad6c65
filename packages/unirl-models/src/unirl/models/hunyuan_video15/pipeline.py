"""HunyuanVideo 1.5 as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.hunyuan_video15.adapter import HunyuanVideo15Adapter
from unirl.models.hunyuan_video15.image_adapter import HunyuanVideo15ImageAdapter


class HunyuanVideo15Pipeline(DiffusersPipeline):
    """HunyuanVideo 1.5, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = HunyuanVideo15Adapter


class HunyuanVideo15ImagePipeline(DiffusersPipeline):
    """HunyuanVideo 1.5 from a first frame, see `HunyuanVideo15Pipeline`."""

    adapter_class = HunyuanVideo15ImageAdapter
