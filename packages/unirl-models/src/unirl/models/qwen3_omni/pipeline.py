"""Qwen3-Omni's Thinker as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.qwen3_omni.adapter import Qwen3OmniAdapter
from unirl.models.qwen3_omni.bundle import Qwen3OmniThinkerBundle
from unirl.models.text_pipeline import AutoregressivePipeline


class Qwen3OmniThinkerPipeline(AutoregressivePipeline):
    """See `unirl.models.text_pipeline.AutoregressivePipeline`.

    chat_template, system_prompt: see `TextAdapter`. packed: see the base.
    """

    def __init__(
        self,
        bundle: Qwen3OmniThinkerBundle,
        *,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        packed: bool | None = None,
    ) -> None:
        adapter = Qwen3OmniAdapter(bundle, chat_template=chat_template, system_prompt=system_prompt)
        super().__init__(adapter, packed=packed)
