"""Which prompt a writer's completion asks for: pure functions of text."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError

THOUGHT_END = "</think>"
_QUOTES = "\"'`"


@dataclass(frozen=True)
class PromptReader:
    """How a prompt is read off a completion.

    marker: text after which the prompt stands, the last time that it occurs; None: the whole completion is the prompt.
    max_chars: longer prompts are cut between words; None sets no limit.
    """

    marker: str | None = None
    max_chars: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.marker is not None and not self.marker.strip():
            raise ConfigError(f"engine.marker = {self.marker!r} is found everywhere. Write a word, or null for none.")

    def read(self, completion: str) -> str:
        """The prompt, without a chain of thought, quotes around it and runs of spaces; empty where there is none."""
        _, _, said = completion.rpartition(THOUGHT_END)
        if self.marker is not None:
            _, found, said = said.rpartition(self.marker)
            if not found:
                return ""
        words = " ".join(said.split())
        while len(words) > 1 and words[0] in _QUOTES and words[-1] == words[0]:
            words = words[1:-1].strip()
        return words.strip(_QUOTES + " ") and words

    def shortened(self, prompt: str) -> str:
        """The prompt, or of one that is too long the words that fit; of one word its first characters."""
        if self.max_chars is None or len(prompt) <= self.max_chars:
            return prompt
        whole, space, _ = prompt[: self.max_chars + 1].rpartition(" ")
        return whole if space else prompt[: self.max_chars]
