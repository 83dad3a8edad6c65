"""Qwen2.5-VL and Qwen3-VL as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.causal_lm.pipeline import ChatPipeline
from unirl.models.qwen_vl.adapter import QwenVLAdapter


class QwenVLPipeline(ChatPipeline):
    """Qwen2.5-VL or Qwen3-VL, see `ChatPipeline`."""

    adapter_class = QwenVLAdapter
