"""The words around prompts, images and answers of HunyuanImage3.

    instruct   <|startoftext|> [system, blank] "User: " images prompt blank "Assistant: " thought <answer> image
    pretrain   <|startoftext|> [system] images prompt thought image
where a blank is an empty line and an image is <boi> <img_size> <img_ratio> <timestep> tokens <eoi>. Every part is
tokenised by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from unirl.models.causal_lm.tokenizer import require_words
from unirl.models.hunyuan_image3.layout import Grid, Segment

Style = Literal["instruct", "pretrain"]

BREAK = "\n\n"
_SECTION = re.compile(r"(<(think|recaption)>)(.*?)(</\2>)", re.DOTALL)


@dataclass(frozen=True)
class WordIds:
    """Words with their own meaning, and ids beyond the vocabulary for what no word stands for."""

    begin: int
    end: int
    image_begin: int
    image_end: int
    separator: int
    """Between an image as latents and as the vision tower sees it."""
    masked: int
    """Stands for each word of a prompt that guidance leaves out."""
    size: int
    ratios: tuple[int, ...]
    """One for each size of images."""
    answer: int
    answer_end: int
    think: int
    think_end: int
    recaption: int
    recaption_end: int
    num_words: int
    """Size of the vocabulary; ids from here on are no words."""

    @property
    def timestep(self) -> int:
        """Stands for the noise level of an image."""
        return self.num_words

    @property
    def latent(self) -> int:
        """Stands for a latent token."""
        return self.num_words + 1

    @property
    def visual(self) -> int:
        """Stands for a token of the vision tower."""
        return self.num_words + 2

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, base_size: int, num_sizes: int, path: Path) -> Self:
        """The ids of a tokenizer of transformers. Raises CheckpointError if it lacks a word or has too many."""
        names = {
            "begin": "<|startoftext|>",
            "end": "<|endoftext|>",
            "image_begin": "<boi>",
            "image_end": "<eoi>",
            "separator": "<joint_img_sep>",
            "masked": "<cfg>",
            "size": f"<img_size_{base_size}>",
            "answer": "<answer>",
            "answer_end": "</answer>",
            "think": "<think>",
            "think_end": "</think>",
            "recaption": "<recaption>",
            "recaption_end": "</recaption>",
        }
        ratios = [f"<img_ratio_{place}>" for place in range(num_sizes)]
        ids = require_words(tokenizer, (*names.values(), *ratios), vocab_size, path)
        return cls(**dict(zip(names, ids, strict=False)), ratios=tuple(ids[len(names) :]), num_words=vocab_size)

    def image_header(self, size_place: int) -> list[int]:
        """What is before the noise level of an image."""
        return [self.image_begin, self.size, self.ratios[size_place]]

    def given_image(self, size_place: int, num_latents: int, num_visual: int) -> list[int]:
        """An image of a prompt."""
        tokens = [self.timestep, *[self.latent] * num_latents, self.separator, *[self.visual] * num_visual]
        return [*self.image_header(size_place), *tokens, self.image_end]

    def segments(self, ids: Sequence[int], images: Sequence[tuple[Grid, Grid]]) -> list[Segment]:
        """The segments of a row whose images have these grids, as latents and as patches."""
        found: list[Segment] = []
        remaining, begin = iter(images), 0
        while self.latent in ids[begin:]:
            start = ids.index(self.latent, begin)
            end = ids.index(self.image_end, start)
            found += [Segment(start - begin), Segment(end - start, next(remaining))]
            begin = end
        if begin < len(ids):
            found.append(Segment(len(ids) - begin))
        return found


class Template:
    """Prompts as the published code writes them.

    style: of the checkpoint's `generation_config.json`, as drops_thoughts: whether <think> ... </think> is left out
        before an image. system_prompt: None leaves the part out.
    """

    def __init__(
        self, tokenizer: Any, words: WordIds, style: Style, *, drops_thoughts: bool, system_prompt: str | None
    ) -> None:
        self._tokenizer = tokenizer
        self._words = words
        self._is_chat = style == "instruct"
        self._drops_thoughts = drops_thoughts
        self._system = "" if system_prompt is None else system_prompt.strip()

    def prompt(self, text: str, images: Sequence[int], *, is_masked: bool = False) -> list[int]:
        """A prompt, up to where the model writes. images: ids of those given. is_masked: the text is left out."""
        ids = [self._words.begin]
        if self._system:
            ids += self._ids(self._system) + self._ids(BREAK if self._is_chat else "")
        user, assistant = ("User: ", "Assistant: ") if self._is_chat else ("", "")
        ids += self._ids(user) + list(images) + self._masked(text, is_masked)
        return ids + self._ids(BREAK if self._is_chat else "") + self._ids(assistant)

    def before_image(self, thought: str, size_place: int, *, is_masked: bool = False) -> list[int]:
        """What follows the prompt, up to the noise level of the image that is made."""
        ids, begin = [], 0
        for section in _SECTION.finditer(thought):
            ids += self._masked(thought[begin : section.start()], is_masked)
            if not (self._drops_thoughts and section[2] == "think"):
                ids += self._ids(section[1]) + self._masked(section[3], is_masked) + self._ids(section[4])
            begin = section.end()
        ids += self._masked(thought[begin:], is_masked)
        answer = [self._words.answer] if self._is_chat else []
        return [*ids, *answer, *self._words.image_header(size_place)]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _masked(self, text: str, is_masked: bool) -> list[int]:
        ids = self._ids(text)
        return [self._words.masked] * len(ids) if is_masked else ids
