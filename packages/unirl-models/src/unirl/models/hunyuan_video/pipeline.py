"""HunyuanVideo as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.hunyuan_video.adapter import HunyuanVideoAdapter
from unirl.models.hunyuan_video.image_adapter import HunyuanVideoImageAdapter


class HunyuanVideoPipeline(DiffusersPipeline):
    """HunyuanVideo, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = HunyuanVideoAdapter


class HunyuanVideoImagePipeline(DiffusersPipeline):
    """HunyuanVideo from a first frame, see `HunyuanVideoPipeline`."""

    adapter_class = HunyuanVideoImageAdapter
