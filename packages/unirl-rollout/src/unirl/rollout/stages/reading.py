"""Stage readers: how a stage derives its input from the request and its parent tracks. See
`unirl.types.stages.StageReader`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.types.bounds import PositiveFraction, PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.rollout import RolloutTrack
from unirl.types.segments import LatentSegment, TextSegment
from unirl.types.stages import Above, Inputs, Reading, Size

PLACE = "{prompt}"
"""Placeholder of the user's prompt in an instruction."""
THOUGHT = "thought"
"""Slot of the text that a unified model writes before drawing."""
THOUGHT_END = "</think>"
_QUOTES = "\"'`"


class Asked:
    """Reads the user's request only.

    `trainer check` reads the class attributes without importing the class, so they are literals.
    """

    reads_text: ClassVar[bool] = False
    """True if the parent stage must make texts."""
    reads_latents: ClassVar[bool] = False
    """True if the parent stage must make latents, from which this one starts."""
    reads_sizes: ClassVar[bool] = False
    """True if the parent's texts may choose the size of each image (`chooses_size` of their pipeline)."""

    def of_prompt(self, asked: Inputs) -> Reading:
        return Reading(inputs=dict(asked))

    def of_tracks(self, above: Above) -> Reading:
        return Reading(inputs=dict(above.asked))

    def possible_sizes(self, parent: Any) -> Sequence[Size]:  # Any: as in StageReader
        return ()

    def levels(self, sigmas: Tensor) -> Tensor:
        return sigmas


@bounded("reads")
class Instruction(Asked):
    """Reads an instruction that contains the user's prompt.

    template: text with {prompt} in it, and for a stage that grows from a text, {text}.
    """

    def __init__(self, template: str) -> None:
        if PLACE not in template and "{text}" not in template:
            raise ConfigError(
                f"reads.template = {template!r} holds neither {PLACE}, the user's prompt, nor {{text}}, what the stage "
                "grows from."
            )
        self._template = template

    def of_prompt(self, asked: Inputs) -> Reading:
        return Reading(inputs={**asked, "text": Texts(texts=[self._filled(text, "") for text in texts_of(asked)])})

    def of_tracks(self, above: Above) -> Reading:
        pairs = zip(texts_of(above.asked), decoded_texts(above.parent), strict=True)
        return Reading(inputs={**above.asked, "text": Texts(texts=[self._filled(*pair) for pair in pairs])})

    def _filled(self, prompt: str, text: str) -> str:
        # Not str.format: an instruction may hold other braces.
        before, place, after = self._template.partition(PLACE)
        return before.replace("{text}", text) + (prompt if place else "") + after.replace("{text}", text)


@bounded("reads")
class WrittenPrompt(Asked):
    """Reads the prompt in a completion, or the user's prompt if it has none.

    marker: the prompt follows its last occurrence; None: the whole completion is the prompt. max_chars: longer prompts
    are cut between words; None sets no limit.
    Metrics per completion: `fallback`, 1 if the user's prompt was read, and `shortened`, 1 if the prompt was cut.
    """

    reads_text: ClassVar[bool] = True

    def __init__(self, *, marker: str | None = None, max_chars: PositiveInt | None = None) -> None:
        if marker is not None and not marker.strip():
            raise ConfigError(f"reads.marker = {marker!r} is found everywhere. Write a word, or null for none.")
        self._marker = marker
        self._max_chars = max_chars

    def of_tracks(self, above: Above) -> Reading:
        found = [self.prompt_in(completion) for completion in decoded_texts(above.parent)]
        short = [self.shortened(prompt) for prompt in found]
        prompts = [prompt or asked for prompt, asked in zip(short, texts_of(above.asked), strict=True)]
        return Reading(
            inputs={"text": Texts(texts=prompts)},
            counts={
                "fallback": torch.tensor([float(not prompt) for prompt in found]),
                "shortened": torch.tensor([float(a != b) for a, b in zip(found, short, strict=True)]),
            },
        )

    def prompt_in(self, completion: str) -> str:
        """The prompt without chain of thought, surrounding quotes and repeated spaces; empty if there is none."""
        _, _, said = completion.rpartition(THOUGHT_END)
        if self._marker is not None:
            _, found, said = said.rpartition(self._marker)
            if not found:
                return ""
        words = " ".join(said.split())
        while len(words) > 1 and words[0] in _QUOTES and words[-1] == words[0]:
            words = words[1:-1].strip()
        return words.strip(_QUOTES + " ") and words

    def shortened(self, prompt: str) -> str:
        """The prompt, cut to the words that fit; a single long word is cut to its first characters."""
        if self._max_chars is None or len(prompt) <= self._max_chars:
            return prompt
        whole, space, _ = prompt[: self._max_chars + 1].rpartition(" ")
        return whole if space else prompt[: self._max_chars]


class Thought(Asked):
    """Reads the user's request, and in the slot "thought" what the model wrote about it.

    If thoughts choose the size of their image (`ThoughtPipeline.image_sizes`), each image has that size, or that of the
    sampling parameters if the thought chose none.
    Metrics per thought: `empty`, 1 if nothing was written, and `no_size`, 1 if no size was chosen.
    """

    reads_text: ClassVar[bool] = True
    reads_sizes: ClassVar[bool] = True

    def of_tracks(self, above: Above) -> Reading:
        thoughts, parent = decoded_texts(above.parent), next(iter(above.tracks))
        counts = {"empty": torch.tensor([float(not thought) for thought in thoughts])}
        writing, sizes = above.pipelines[parent], None
        if self.possible_sizes(writing):
            sizes = writing.chosen_sizes(_tokens_of(above.parent))
            counts["no_size"] = torch.tensor([float(size is None) for size in sizes])
        inputs = {**above.asked, THOUGHT: Texts(texts=list(thoughts))}
        return Reading(inputs=inputs, counts=counts, sizes=sizes)

    def possible_sizes(self, parent: Any) -> Sequence[Size]:
        return parent.image_sizes


@bounded("reads")
class Redraw(Asked):
    """Reads the parent's image and its prompt: the stage continues from the image with noise added (SDEdit, arXiv
    2108.01073). For flow-matching models whose trajectories start from plain noise.

    strength: noise level at which the stage begins, 1 being pure noise; the schedule's levels are multiplied by it.
    """

    reads_latents: ClassVar[bool] = True

    def __init__(self, strength: PositiveFraction) -> None:
        self._strength = strength

    def of_tracks(self, above: Above) -> Reading:
        drawn = above.parent
        if not isinstance(drawn.segment, LatentSegment):
            raise ContractError(f"the stage above holds {type(drawn.segment).__name__}, not latents of one size")
        return Reading(inputs=dict(drawn.primitives), start=drawn.segment.clean_latents)

    def levels(self, sigmas: Tensor) -> Tensor:
        return sigmas * self._strength


def texts_of(inputs: Inputs) -> list[str]:
    """The texts in the slot "text". Raises ContractError if there are none."""
    texts = inputs.get("text")
    if not isinstance(texts, Texts):
        raise ContractError(f"a request for several stages needs primitives['text'], it has {sorted(inputs)}")
    return texts.texts


def decoded_texts(written: RolloutTrack) -> list[str]:
    """The texts of a track. Raises ContractError if it holds another type."""
    if not isinstance(written.decoded, Texts):
        raise ContractError(f"the stage above made {type(written.decoded).__name__}, this one reads Texts")
    return written.decoded.texts


def _tokens_of(written: RolloutTrack) -> TextSegment:
    if not isinstance(written.segment, TextSegment):
        raise ContractError(f"the stage above holds {type(written.segment).__name__}, not tokens")
    return written.segment
