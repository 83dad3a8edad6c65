"""Qwen3-Omni's Thinker as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.causal_lm.pipeline import ChatPipeline
from unirl.models.qwen3_omni.adapter import Qwen3OmniAdapter
from unirl.models.qwen3_omni.bundle import Qwen3OmniThinkerBundle
from unirl.models.routed_pipeline import RoutedPipeline


class Qwen3OmniThinkerPipeline(RoutedPipeline, ChatPipeline):
    """Qwen3-Omni's Thinker, see `ChatPipeline`. replays_experts: see `RoutedPipeline.route`."""

    adapter_class = Qwen3OmniAdapter

    def __init__(
        self,
        bundle: Qwen3OmniThinkerBundle,
        *,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        packed: bool | None = None,
        replays_experts: bool = False,
    ) -> None:
        ChatPipeline.__init__(self, bundle, chat_template=chat_template, system_prompt=system_prompt, packed=packed)
        self.route(bundle, replays_experts=replays_experts)
