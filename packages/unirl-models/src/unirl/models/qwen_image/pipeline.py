"""Qwen-Image as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.qwen_image.adapter import QwenImageAdapter


class QwenImagePipeline(DiffusersPipeline):
    """Qwen-Image, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = QwenImageAdapter
