"""Qwen3-Omni's Thinker as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.causal_lm.pipeline import ChatPipeline
from unirl.models.qwen3_omni.adapter import Qwen3OmniAdapter


class Qwen3OmniThinkerPipeline(ChatPipeline):
    """Qwen3-Omni's Thinker, see `ChatPipeline`."""

    adapter_class = Qwen3OmniAdapter
