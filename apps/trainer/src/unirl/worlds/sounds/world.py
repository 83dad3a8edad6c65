"""The sounds world: every prompt, videos and sounds that fit it, ones that nearly fit it, and how they are drawn.

What is seen is one object of the moves world about the middle of a 32 x 32 video. What is heard is a tone for each half
of the sound. Videos and sounds are right or wrong independently of each other. `python -m unirl.worlds.sounds.world
--out DIR` writes the prompt files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from unirl.pretraining.prompt_files import split_keys, write_from_command_line, write_split
from unirl.reward.worlds.moves_grammar import COLORS, DIRECTIONS, MOTIONS, MovesSpec, MovingObject
from unirl.reward.worlds.shapes_grammar import PALETTE, SHAPES, ShapeObject
from unirl.reward.worlds.sounds_grammar import TONES, SoundsSpec, parse_prompt, prompt_of
from unirl.worlds.shapes.world import IMAGE_SIDE, coverage

NUM_FRAMES = 9
"""8k + 1, as LTX-2 wants it: two latent frames."""
TRAVEL = 9.0
"""Pixels from the first frame to the last, at constant speed."""
RATE = 8000
"""Samples of sound per second."""
HOP = 128
"""Samples per column of a spectrogram."""
NUM_COLUMNS = 21
"""Columns of a spectrogram: what six latent steps decode to, as many as .375 s of video have."""
HARMONICS: Mapping[str, tuple[int, int]] = MappingProxyType({"low": (4, 5), "middle": (9, 10), "high": (18, 20)})
"""The two pitches of each tone in multiples of RATE / HOP = 62.5 Hz.

A vocoder sees magnitudes, and one of convolutions alone answers a steady spectrogram with what repeats every HOP: so
only these multiples can come out of it.
"""
HELDOUT_FRACTION = 0.25
NEAR_MISS_FRACTION = 0.35
"""Share of the pretraining videos, and of the sounds, that are wrong for their caption in one respect."""

Sound = tuple[str | None, str | None]
"""The tone of the first and of the second half; None is silence."""

_CENTER_JITTER = 1.5
_RADIUS_RANGE = (7.0, 8.0)
_AMPLITUDES = (0.4, 0.8)


def all_specs() -> list[SoundsSpec]:
    """Every request in a fixed order: 45 objects with their motions, each with three tones."""
    return [SoundsSpec(MovesSpec((moving,)), tone) for moving in all_objects() for tone in TONES]


def all_objects() -> list[MovingObject]:
    """What the video can be asked for."""
    return [
        MovingObject(ShapeObject(color, shape), motion) for color in COLORS for shape in SHAPES for motion in MOTIONS
    ]


def all_prompts() -> list[str]:
    """The prompts of `all_specs`."""
    return [prompt_of(spec) for spec in all_specs()]


def split_prompts() -> tuple[list[str], list[str]]:
    """Training and held-out prompts for RL; a quarter of the requests of each tone is held out.

    The split is by the hash of the prompt. Pretraining sees `all_prompts`.
    """
    keys = {tone: {prompt_of(spec) for spec in all_specs() if spec.tone == tone} for tone in TONES}
    train, heldout = split_keys(keys, heldout_fraction=HELDOUT_FRACTION, kept={})
    prompts = all_prompts()
    return [prompt for prompt in prompts if prompt in train], [prompt for prompt in prompts if prompt in heldout]


def write_prompts(folder: Path) -> None:
    """Write `train.jsonl` and `heldout.jsonl`: rows of prompt, prompt_id and metadata.category."""
    write_split(folder, "sounds", split_prompts(), lambda prompt: parse_prompt(prompt).category)


def all_sounds() -> list[Sound]:
    """Every sound that is right or nearly right for a tone."""
    return [(first, second) for first in TONES for second in TONES] + [(None, None)]


def near_miss_video(moving: MovingObject, rng: np.random.Generator) -> MovingObject:
    """What is wrong for `moving` in one respect: its motion (half of them), its colour or its shape."""
    fault, item = rng.random(), moving.item
    if fault < 0.5:
        return replace(moving, motion=_other(MOTIONS, moving.motion, rng))
    if fault < 0.75:
        return replace(moving, item=replace(item, color=_other(COLORS, item.color, rng)))
    return replace(moving, item=replace(item, shape=_other(SHAPES, item.shape, rng)))


def near_miss_sound(tone: str, rng: np.random.Generator) -> Sound:
    """A sound that is wrong for `tone`: another tone (half of them), another one in one half, or silence (a tenth)."""
    other = _other(tuple(TONES), tone, rng)
    fault = rng.random()
    if fault < 0.5:
        return other, other
    if fault < 0.9:
        return (tone, other) if rng.random() < 0.5 else (other, tone)
    return None, None


def sample_video(moving: MovingObject, rng: np.random.Generator, near_miss_fraction: float) -> MovingObject:
    """What is shown for a caption of `moving`, wrong in one respect with probability `near_miss_fraction`."""
    return near_miss_video(moving, rng) if rng.random() < near_miss_fraction else moving


def sample_sound(tone: str, rng: np.random.Generator, near_miss_fraction: float) -> Sound:
    """A sound for the caption `tone`, wrong with probability `near_miss_fraction`."""
    return near_miss_sound(tone, rng) if rng.random() < near_miss_fraction else (tone, tone)


def render_video(moving: MovingObject, rng: np.random.Generator) -> np.ndarray:
    """Draw an object with jittered place and size; uint8 [NUM_FRAMES, 3, 32, 32], black background, antialiased."""
    direction = np.array(DIRECTIONS[moving.motion])
    middle = IMAGE_SIDE / 2 + rng.uniform(-_CENTER_JITTER, _CENTER_JITTER, 2)
    radius = rng.uniform(*_RADIUS_RANGE)
    places = [middle + progress * TRAVEL * direction for progress in np.linspace(-0.5, 0.5, NUM_FRAMES)]
    masks = np.stack([coverage(moving.item.shape, place, radius) for place in places])
    colored = masks[:, None] * np.array(PALETTE[moving.item.color])[:, None, None]
    return np.round(np.clip(colored, 0, 1) * 255).astype(np.uint8)


def render_sound(sound: Sound, rng: np.random.Generator) -> np.ndarray:
    """The waveform of a sound, float32 [NUM_COLUMNS * HOP] within [-1, 1]; pitch and amplitude vary.

    Every column begins at a zero of its tone, since a spectrogram does not say where a wave stands.
    """
    amplitude = rng.uniform(*_AMPLITUDES)
    harmonics = {tone: HARMONICS[tone][rng.integers(2)] for tone in TONES}
    halves = [sound[column * 2 // NUM_COLUMNS] for column in range(NUM_COLUMNS)]
    phase = 2 * np.pi * np.arange(HOP) / HOP
    columns = [np.zeros(HOP) if tone is None else np.sin(harmonics[tone] * phase) for tone in halves]
    return (amplitude * np.concatenate(columns)).astype(np.float32)


def _other(options: Sequence[str], taken: str, rng: np.random.Generator) -> str:
    rest = [option for option in options if option != taken]
    return rest[rng.integers(len(rest))]


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
