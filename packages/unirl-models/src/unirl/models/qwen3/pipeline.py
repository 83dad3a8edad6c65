"""Qwen3 as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.qwen3.adapter import Qwen3Adapter
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.text_pipeline import AutoregressivePipeline


class Qwen3Pipeline(AutoregressivePipeline):
    """Qwen3, see `unirl.models.text_pipeline.AutoregressivePipeline`.

    chat_template, system_prompt, enable_thinking: see `Qwen3Adapter`. packed: see the base.
    """

    def __init__(
        self,
        bundle: Qwen3Bundle,
        *,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        enable_thinking: bool | None = None,
        packed: bool | None = None,
    ) -> None:
        adapter = Qwen3Adapter(
            bundle, chat_template=chat_template, system_prompt=system_prompt, enable_thinking=enable_thinking
        )
        super().__init__(adapter, packed=packed)
