"""Qwen-Image-Edit as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.qwen_image_edit.adapter import QwenImageEditAdapter


class QwenImageEditPipeline(DiffusersPipeline):
    """Qwen-Image-Edit and -Edit-Plus, by their bundle; see `unirl.models.diffusers_pipeline.pipeline`."""

    adapter_class = QwenImageEditAdapter
