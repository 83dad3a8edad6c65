"""Recordings of beeps with multiple-choice questions about them, for models that hear. Generated."""

from __future__ import annotations

import array
import io
import itertools
import math
import sys
import wave
from collections.abc import Iterator, Sequence
from functools import cache

from unirl.datasets.records import Medium, Picture, PromptSet, Row, generated
from unirl.datasets.splitting import is_held_out

SAMPLE_RATE = 16_000
"""Hertz, which speech encoders read."""
PITCHES = (220, 294, 392, 523, 698, 932, 1245, 1661)
"""Hertz, about five semitones apart."""
LENGTHS_S = (0.1, 0.15, 0.25)
"""Seconds of a beep, and of the silence after it."""
NUM_BEEPS = (1, 2, 3, 4)
HELD_OUT = 0.15
"""Fraction of the recordings."""
_FADE_S = 0.01
_LOUDNESS = 0.5


def recording(beeps: Sequence[tuple[int, float]]) -> Picture:
    """A WAV file of 16 bits of (pitch in hertz, length in seconds), each followed by a silence of the same length."""
    samples = array.array("h")
    for pitch, length in beeps:
        samples.extend(_beep(pitch, length))
        samples.extend([0] * round(length * SAMPLE_RATE))
    if sys.byteorder == "big":
        samples.byteswap()
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes(samples.tobytes())
    return Picture(file.getvalue(), ".wav")


@cache
def _beep(pitch: int, length: float) -> tuple[int, ...]:
    """Samples of a sine that rises and falls within _FADE_S."""
    count, fade = round(length * SAMPLE_RATE), _FADE_S * SAMPLE_RATE
    return tuple(
        round(
            32767
            * _LOUDNESS
            * min(1.0, number / fade, (count - 1 - number) / fade)
            * math.sin(2 * math.pi * pitch * number / SAMPLE_RATE)
        )
        for number in range(count)
    )


def rows(*, held_out: bool) -> Iterator[Row]:
    """How many beeps there are, and of two different ones which is higher and which is longer."""
    for count, pitch, length in itertools.product(NUM_BEEPS, PITCHES, LENGTHS_S):
        yield from _asked(
            "How many beeps are there?",
            [str(each) for each in NUM_BEEPS],
            str(count),
            [(pitch, length)] * count,
            held_out,
        )
    for first, second in itertools.permutations(PITCHES, 2):
        higher = "the second" if second > first else "the first"
        beeps = [(first, LENGTHS_S[1]), (second, LENGTHS_S[1])]
        yield from _asked("Which beep is higher?", ["the first", "the second"], higher, beeps, held_out)
    for pitch, (first, second) in itertools.product(PITCHES, itertools.permutations(LENGTHS_S, 2)):
        longer = "the second" if second > first else "the first"
        beeps = [(pitch, first), (pitch, second)]
        yield from _asked("Which beep is longer?", ["the first", "the second"], longer, beeps, held_out)


def _asked(
    question: str, choices: list[str], answer: str, beeps: Sequence[tuple[int, float]], held_out: bool
) -> Iterator[Row]:
    if is_held_out(f"{question} {beeps}", HELD_OUT) == held_out:
        medium = Medium("condition", recording(beeps))
        yield {"question": question, "choices": choices, "answer": answer, "media": [medium]}


HEARD = PromptSet(
    name="heard",
    what="a question with choices, and a recording of beeps to answer it by",
    made="beeps that are counted, and compared in pitch and length; recordings to judge by are in no training row",
    media=(("audio", "condition"),),
    outputs=generated(rows, num_train=167, num_held_out=33),
)
