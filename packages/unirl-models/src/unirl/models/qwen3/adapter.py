"""How Qwen3 reads a prompt."""

from __future__ import annotations

from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.text_adapter import TextAdapter


class Qwen3Adapter(TextAdapter):
    """Qwen3, see `TextAdapter`.

    enable_thinking: whether the template leaves room for a chain of thought (it does by default) or closes it at once;
        None leaves the template its default, and is the only choice without a template.
    """

    def __init__(
        self,
        bundle: Qwen3Bundle,
        *,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        enable_thinking: bool | None = None,
    ) -> None:
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        super().__init__(bundle, chat_template=chat_template, system_prompt=system_prompt, template_kwargs=thinking)
