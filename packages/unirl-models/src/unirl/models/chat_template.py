"""The chat template of a tokenizer: what it writes before a model's first turn, and between its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from unirl.types.errors import ConfigError
from unirl.types.messages import ASSISTANT

_WRITTEN = "<<written by the model>>"
"""Stands for a turn of the model while a template is rendered."""


class TemplatedModel(Protocol):
    """What a template needs to know of a language model."""

    @property
    def pretrained_model(self) -> str:
        """Folder or hub id."""
        ...

    @property
    def tokenizer(self) -> Any:  # Any: a tokenizer of transformers
        """Has the template."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        ...


class ChatTemplate:
    """The template with the system's message, the tools and the options that every prompt of a run has.

    is_wanted: None applies the template where there is one. options: of the template, e.g. enable_thinking.
    Raises ConfigError if a template is wanted that does not exist, or options are given without one.
    """

    def __init__(
        self,
        model: TemplatedModel,
        *,
        is_wanted: bool | None,
        system_prompt: str | None,
        options: Mapping[str, Any] | None,  # Any: whatever the template reads
    ) -> None:
        has_template = model.tokenizer.chat_template is not None
        if is_wanted and not has_template:
            raise ConfigError(
                f"chat_template = true, but the tokenizer of {model.pretrained_model} has no template. Base models "
                "are prompted as they are: set chat_template: false."
            )
        self.is_used = has_template if is_wanted is None else is_wanted
        if not self.is_used and (system_prompt is not None or options):
            raise ConfigError("system_prompt and template_kwargs do nothing without a chat template. Remove them.")
        self._model = model
        self._system_prompt = system_prompt
        self._options = dict(options or {})
        self._scaffolds: dict[tuple[str, ...], tuple[list[list[int]], int]] = {}

    def opening(self, messages: list[dict[str, Any]]) -> list[int]:  # Any: the library declares contents of text alone
        """Tokens of what stands before the model's first turn, in the chat template, under the system prompt."""
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        rendered = self._model.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            **self._options,
        )
        # The template has written every special token that it wants.
        return self._model.tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def offer_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON
        """From now on prompts name these tools. Raises ConfigError if no template is used, or it names no tools."""
        template = self._model.tokenizer.chat_template if self.is_used else None
        if template is None or "tools" not in str(template):
            raise ConfigError(
                f"the chat template of {self._model.pretrained_model} names no tools, so the model would not know of "
                "them. Name them in the prompts and set turns.shows_tools: false, or take a model whose template does."
            )
        self._options["tools"] = [dict(schema) for schema in schemas]
        self._scaffolds.clear()

    def set_system_prompt(self, text: str) -> None:
        """From now on prompts stand under this message of the system. Raises ConfigError if no template is used, or
        there is another message."""
        if not self.is_used:
            raise ConfigError(
                f"the environment has a message of the system ({text[:60]!r}), and {self._model.pretrained_model} is "
                "prompted without a chat template. Take a model whose tokenizer has one."
            )
        if self._system_prompt not in (None, text):
            raise ConfigError(
                f"pipeline.system_prompt = {self._system_prompt!r}, and the environment has {text!r}. Remove one."
            )
        self._system_prompt = text

    def between(self, roles: tuple[str, ...]) -> list[list[int]]:
        """Tokens before, between and behind messages of these roles that follow a turn of the model."""
        return self._scaffold(roles)[0]

    @property
    def turn_end(self) -> int:
        """The token that ends a turn of the model."""
        return self._scaffold(())[1]

    def _scaffold(self, roles: tuple[str, ...]) -> tuple[list[list[int]], int]:
        """As `between` and `turn_end`. Rendered once: it does not depend on what the messages say."""
        if roles not in self._scaffolds:
            self._scaffolds[roles] = self._rendered_scaffold(roles)
        return self._scaffolds[roles]

    def _rendered_scaffold(self, roles: tuple[str, ...]) -> tuple[list[list[int]], int]:
        marks = [f"<<message {place} of {len(roles)}>>" for place in range(len(roles))]
        rendered = self._model.tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "question"},
                {"role": ASSISTANT, "content": _WRITTEN},
                *({"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)),
            ],
            tokenize=False,
            add_generation_prompt=True,
            **self._options,
        )
        rest = str(rendered).partition(_WRITTEN)[2]
        start, end = self._end_of_turn(rest)
        rest, pieces = rest[start:], []
        for role, mark in zip(roles, marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found:
                raise ConfigError(
                    f"the chat template of {self._model.pretrained_model} leaves out messages of the role {role!r}"
                )
            pieces.append(before)
        tokenizer = self._model.tokenizer
        return [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in (*pieces, rest)], end

    def _end_of_turn(self, behind: str) -> tuple[int, int]:
        """Place behind the first end-of-sequence token in what follows a turn of the model, and that token."""
        ends = self._model.tokenizer.convert_ids_to_tokens(list(self._model.eos_token_ids))
        places = [
            (behind.find(end) + len(end), token)
            for token, end in zip(self._model.eos_token_ids, ends, strict=True)
            if end in behind
        ]
        if not places:
            raise ConfigError(
                f"the chat template of {self._model.pretrained_model} ends a turn of the model with none of its "
                f"end-of-sequence tokens {ends}, so nothing can follow a turn. Give generation_config.json the token "
                "that ends a turn as eos_token_id."
            )
        return min(places)
