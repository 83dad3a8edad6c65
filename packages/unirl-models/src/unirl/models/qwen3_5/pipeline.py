"""Qwen3.5 as the pipelines that recipes name."""

from __future__ import annotations

from unirl.models.qwen3.pipeline import Qwen3MoePipeline, Qwen3Pipeline
from unirl.models.qwen_vl.pipeline import QwenVLPipeline


class Qwen35Pipeline(Qwen3Pipeline):
    """The language model of Qwen3.5, see `Qwen3Pipeline`."""


class Qwen35MoePipeline(Qwen3MoePipeline):
    """The language model of Qwen3.5 with experts, see `Qwen3MoePipeline`."""


class Qwen35VLPipeline(QwenVLPipeline):
    """Qwen3.5 with images, see `QwenVLPipeline`."""
