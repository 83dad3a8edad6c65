"""Qwen3.5 as the pipelines that recipes name."""

from __future__ import annotations

from unirl.models.qwen3.pipeline import Qwen3Pipeline
from unirl.models.qwen3_5.bundle import Qwen35MoeBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.models.routed_pipeline import RoutedPipeline


class Qwen35Pipeline(Qwen3Pipeline):
    """The language model of Qwen3.5, see `Qwen3Pipeline`."""


class Qwen35MoePipeline(RoutedPipeline, Qwen35Pipeline):
    """With experts. replays_experts: see `RoutedPipeline.route`."""

    def __init__(
        self,
        bundle: Qwen35MoeBundle,
        *,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        enable_thinking: bool | None = None,
        packed: bool | None = None,
        replays_experts: bool = False,
    ) -> None:
        Qwen35Pipeline.__init__(
            self,
            bundle,
            chat_template=chat_template,
            system_prompt=system_prompt,
            enable_thinking=enable_thinking,
            packed=packed,
        )
        self.route(bundle, replays_experts=replays_experts)


class Qwen35VLPipeline(QwenVLPipeline):
    """Qwen3.5 with images, see `QwenVLPipeline`."""
