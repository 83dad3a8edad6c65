"""What scorers ask a vision-language model: questions about images, and what comes back.

A judge is an endpoint (`api_judge`) or a model in this process (`vlm_judge`); scorers see only this protocol. One
question that fails does not fail the others: its place in the answer holds a JudgeError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from PIL import Image
from torch import nn

from unirl.reward.local.pixels import to_pictures
from unirl.types.errors import ConfigError, RewardError
from unirl.types.media import Videos
from unirl.types.reward import RewardRequest


class JudgeError(RewardError):
    """A question that got no answer, or one that cannot be read."""


@dataclass(frozen=True)
class Question:
    """Images, then text, in one turn of the user."""

    text: str
    pictures: tuple[Image.Image, ...]


@dataclass(frozen=True)
class Step:
    """One token of a reply, and how likely it and its strongest rivals were."""

    token: str
    probabilities: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What a judge wrote. steps: its tokens in order; empty where the judge gives no probabilities."""

    text: str
    steps: tuple[Step, ...] = ()


class Judge(Protocol):
    """Answers questions about images. Both methods keep the order of the questions."""

    @property
    def has_probabilities(self) -> bool:
        """True if it gives probabilities of tokens; without them answers are read from text."""

    def modules(self) -> list[nn.Module]:
        """What offloading moves; nothing for an endpoint."""

    def answer_probabilities(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float | JudgeError]:
        """P(`answers[i]` opens the reply to `questions[i]`), summed over the ways to write it (`surface_forms`)."""

    def replies(self, questions: Sequence[Question], max_tokens: int) -> list[Reply | JudgeError]:
        """The most likely reply to each question, token by token, of at most `max_tokens` tokens."""


def pictures_of(request: RewardRequest, num_frames: int) -> list[tuple[Image.Image, ...]]:
    """The images that a judge sees of each sample: the image, or `num_frames` frames of a video in order.

    Raises ContractError for pixels outside [0, 1], and for a request with neither images nor videos.
    """
    media = request.generated.get("video")
    if isinstance(media, Videos):
        return [tuple(to_pictures(frames[spread(len(frames), num_frames)])) for frames in media.unpack("frames")]
    return [(picture,) for picture in to_pictures(request.pixels)]


def spread(num_frames: int, num_wanted: int) -> list[int]:
    """`num_wanted` positions from the first frame to the last, evenly; every frame once where there are fewer."""
    if num_frames <= num_wanted:
        return list(range(num_frames))
    return torch.linspace(0, num_frames - 1, num_wanted).round().long().tolist()


def sources_of(request: RewardRequest, scorer: str) -> list[Image.Image]:
    """The images that edits started from. Raises ConfigError if the request has none, or several for a sample."""
    if "image" not in request.primitives:
        raise ConfigError(
            f"scorer {scorer} compares an edit with the image it started from, but the request has inputs "
            f"{sorted(request.primitives)}. Give the data rows per image."
        )
    counts = sorted({len(sample) for sample in request.sources})
    if counts != [1]:
        raise ConfigError(
            f"scorer {scorer} compares an edit with the one image it started from; the samples bring {counts} images. "
            "Give each data row one image, or take another scorer."
        )
    return [to_pictures(image[None])[0] for (image,) in request.sources]
