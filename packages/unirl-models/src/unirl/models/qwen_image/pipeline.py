"""Qwen-Image as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.qwen_image.adapter import QwenImageAdapter
from unirl.models.qwen_image.inpaint_adapter import QwenImageInpaintAdapter


class QwenImagePipeline(DiffusersPipeline):
    """Qwen-Image, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = QwenImageAdapter


class QwenImageInpaintPipeline(DiffusersPipeline):
    """Qwen-Image that paints into an image, see `QwenImagePipeline`."""

    adapter_class = QwenImageInpaintAdapter
