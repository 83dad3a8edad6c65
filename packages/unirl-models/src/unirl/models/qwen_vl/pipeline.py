"""Qwen2.5-VL and Qwen3-VL as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.qwen_vl.adapter import QwenVLAdapter
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.text_pipeline import AutoregressivePipeline


class QwenVLPipeline(AutoregressivePipeline):
    """Qwen2.5-VL or Qwen3-VL, see `unirl.models.text_pipeline.AutoregressivePipeline`.

    chat_template, system_prompt: see `QwenVLAdapter`. packed: see the base.
    """

    def __init__(
        self,
        bundle: QwenVLBundle,
        *,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        packed: bool | None = None,
    ) -> None:
        adapter = QwenVLAdapter(bundle, chat_template=chat_template, system_prompt=system_prompt)
        super().__init__(adapter, packed=packed)
