"""Samples as people and tools see them: one record per sample of a track, whatever made it.

Legend: C channels, H W pixels, F frames, L waveform samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Image:
    """An image of a sample or of its prompt."""

    pixels: Tensor
    """uint8 [C, H, W]."""
    source: str | None = None
    """Where an image of a prompt comes from."""


@dataclass(frozen=True, eq=False)
class Sound:
    """A waveform of a sample or of its prompt."""

    waveform: Tensor
    """float [L] or [L, C] in [-1, 1]."""
    rate: int | None
    """Waveform samples per second; None where the model does not say."""


@dataclass(frozen=True, eq=False)
class Video:
    """A video, or frames of it."""

    frames: Tensor
    """uint8 [F, C, H, W]."""
    fps: float | None
    """Frames per second; None where the model does not say."""
    num_frames: int
    """Frames of the whole video: more than F where these are only an excerpt, evenly spread."""
    sound: Sound | None = None

    @property
    def is_excerpt(self) -> bool:
        return len(self.frames) < self.num_frames


@dataclass(frozen=True)
class Text:
    """A text that a model wrote."""

    text: str
    num_tokens: int | None


@dataclass(frozen=True)
class Unshown:
    """Media of a kind that nothing here shows or writes, such as embeddings."""

    kind: str


Medium = Image | Video | Sound | Text | Unshown


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRecord:
    """One sample of one track: what was asked for, what was made, and how it was judged."""

    sample_id: str
    track: str
    group_id: str
    """Samples with one group id are compared with each other: those of a prompt, or of the sample they grew from."""
    group_size: int | None = None
    """Samples of the group that were made, recorded or not."""
    group_reward_std: float | None = None
    """Standard deviation of the reward over the whole group; 0 marks a group that teaches nothing. None where a sample
    has no reward."""
    prompt_id: str
    """Group of the root sample: equal for all that was made from a prompt, in every track."""
    parent_id: str | None = None
    """Sample of `parent_track` that this one grew from; None in a root track."""
    parent_track: str | None = None
    prompt: str
    """What the user asked for; empty where that is no text."""
    given: tuple[Medium, ...] = ()
    """What the prompt shows or plays."""
    drawn_from: str | None = None
    """The written prompt or thought that a child was made from; None where it read no text, and in a root track."""
    media: Medium | None = None
    """None where the engine decodes nothing."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """"reward" and each component; empty where the sample was not scored."""
    error: str | None = None
    """Why scoring failed."""
    advantage: float | None = None
    policy_version: int | None = None
    """Optimizer steps of the policy before the sample was made."""
    end: str | None = None
    """How generation ended: "completed", "truncated" (at the token limit) or "aborted"; None for latents."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What the engine counted of the sample; names of seconds end in _s."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # Any: a row of a user's data file
    """The row of the data file without its prompt, such as the right answer."""
