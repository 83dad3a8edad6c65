"""The language of the sounds world: an object that moves, and a tone.

a red circle moves left, a high tone

Both the generator of data and the verifiers read prompts here, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from unirl.reward.worlds import moves_grammar
from unirl.reward.worlds.moves_grammar import COLORS, MOTIONS, MovesSpec
from unirl.reward.worlds.shapes_grammar import SHAPES

TONES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"low": (210.0, 360.0), "middle": (480.0, 720.0), "high": (960.0, 1440.0)}
)
"""Lowest and highest pitch of each tone in Hz. Between two bands lies what is neither."""

EXAMPLES = "'a red circle moves left, a high tone', 'a green triangle stays, a low tone'"


@dataclass(frozen=True)
class SoundsSpec:
    """What a prompt asks for: the object in the video, moving as it says, and one tone through the whole sound."""

    video: MovesSpec
    """One object."""
    tone: str
    """One of TONES."""

    @property
    def category(self) -> str:
        """The tone."""
        return self.tone


def prompt_of(spec: SoundsSpec) -> str:
    """The sentence for `spec`; `parse_prompt` inverts it."""
    return f"{video_prompt_of(spec)}, a {spec.tone} tone"


def video_prompt_of(spec: SoundsSpec) -> str:
    """The part of the sentence that the video answers, a sentence of the moves world."""
    return moves_grammar.prompt_of(spec.video)


@lru_cache(maxsize=4096)
def parse_prompt(prompt: str) -> SoundsSpec:
    """Read a prompt. Raises ValueError naming the prompt and the sentences that are understood."""
    object_part, _, tone_part = prompt.rpartition(", ")
    words = tone_part.split(" ")
    try:
        video = moves_grammar.parse_prompt(object_part)
    except ValueError:
        video = None
    if video is None or len(video.objects) != 1 or words[0] != "a" or words[2:] != ["tone"] or words[1] not in TONES:
        raise ValueError(
            f"prompt {prompt!r} is not a sentence of the sounds world; colours: {', '.join(COLORS)}; "
            f"shapes: {', '.join(SHAPES)}; motions: {', '.join(MOTIONS)}; tones: {', '.join(TONES)}; "
            f"one object and one tone; examples: {EXAMPLES}"
        )
    return SoundsSpec(video, words[1])
