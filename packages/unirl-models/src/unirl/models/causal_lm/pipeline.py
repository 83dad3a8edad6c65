"""Language models that are prompted by messages, as the pipelines that recipes name."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from unirl.models.text_adapter import LanguageBundle, TextAdapter
from unirl.models.text_pipeline import AutoregressivePipeline


class ChatPipeline(AutoregressivePipeline):
    """See `AutoregressivePipeline`. chat_template, system_prompt: see `TextAdapter`. packed: see the base."""

    adapter_class: ClassVar[Callable[..., TextAdapter]] = TextAdapter
    """How the family reads a prompt of its own bundle."""

    def __init__(
        self,
        bundle: LanguageBundle,
        *,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        packed: bool | None = None,
    ) -> None:
        adapter = self.adapter_class(bundle, chat_template=chat_template, system_prompt=system_prompt)
        super().__init__(adapter, packed=packed)
