"""Qwen3 as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.routed_pipeline import RoutedLanguageBundle, RoutedPipeline
from unirl.models.text_adapter import LanguageBundle, TextAdapter
from unirl.models.text_pipeline import AutoregressivePipeline


class Qwen3Pipeline(AutoregressivePipeline):
    """Qwen3, see `unirl.models.text_pipeline.AutoregressivePipeline`.

    chat_template, system_prompt: see `TextAdapter`. packed: see the base.
    enable_thinking: whether the template leaves room for a chain of thought (it does by default) or closes it at once;
        None leaves the template its default, and is the only choice without a template.
    """

    def __init__(
        self,
        bundle: LanguageBundle,
        *,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        enable_thinking: bool | None = None,
        packed: bool | None = None,
    ) -> None:
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        adapter = TextAdapter(
            bundle, chat_template=chat_template, system_prompt=system_prompt, template_kwargs=thinking
        )
        super().__init__(adapter, packed=packed)


class Qwen3MoePipeline(RoutedPipeline, Qwen3Pipeline):
    """Qwen3 with experts, see `Qwen3Pipeline`. replays_experts: see `RoutedPipeline.route`."""

    def __init__(
        self,
        bundle: RoutedLanguageBundle,
        *,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        enable_thinking: bool | None = None,
        packed: bool | None = None,
        replays_experts: bool = False,
    ) -> None:
        Qwen3Pipeline.__init__(
            self,
            bundle,
            chat_template=chat_template,
            system_prompt=system_prompt,
            enable_thinking=enable_thinking,
            packed=packed,
        )
        self.route(bundle, replays_experts=replays_experts)
