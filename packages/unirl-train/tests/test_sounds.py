"""Sounds of prompts: WAV files of every width, other rates against SciPy, rows that name them, and broken files."""

import io
import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import signal

from unirl.data.data_source import PromptRow
from unirl.data.datasets import read_rows
from unirl.data.media import MediaRef
from unirl.data.sounds import prompt_sounds, read_sound, resampled
from unirl.trainer.request import inputs_of
from unirl.types.errors import DataError
from unirl.types.media import Audios, ImageLists

FULL = {1: 128, 2: 2**15, 3: 2**23, 4: 2**31}


def tone(rate: int, hertz: float, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


def wav(numbers: np.ndarray, rate: int = 16000, width: int = 2) -> bytes:
    """numbers [L, C] or [L] in [-1, 1)."""
    whole = np.round(numbers * FULL[width]).astype(np.int64)
    whole = whole + 128 if width == 1 else whole
    as_bytes = b"".join(int(each).to_bytes(width, "little", signed=width > 1) for each in whole.flatten())
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if numbers.ndim == 1 else numbers.shape[1])
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(as_bytes)
    return file.getvalue()


def ref(data: bytes) -> MediaRef:
    return MediaRef("audio", "condition", "a.wav", data=data)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width_are_read_to_their_last_bit(width):
    numbers = tone(16000, 440.0, 0.01)
    found = read_sound(ref(wav(numbers, width=width)))
    assert found.dtype == torch.float32 and found.shape == (160,)
    # Rounded once when it was written, and to float32.
    np.testing.assert_allclose(found.numpy(), numbers, rtol=0, atol=0.5 / FULL[width] + 1e-7)


def test_channels_become_their_mean():
    left, right = tone(16000, 440.0, 0.01), tone(16000, 300.0, 0.01)
    found = read_sound(ref(wav(np.stack([left, right], axis=1))))
    np.testing.assert_allclose(found.numpy(), (left + right) / 2, rtol=0, atol=2e-5)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_another_rate_keeps_what_can_be_heard_as_scipy_does(rate):
    low = torch.from_numpy(tone(rate, 1000.0)).float()
    found = resampled(low, rate, 16000)
    assert found.shape == (8000,)
    inside = slice(200, -200)  # the ends see silence beyond, and each filter cuts it otherwise
    np.testing.assert_allclose(found[inside].numpy(), tone(16000, 1000.0)[inside], rtol=0, atol=2e-3)
    divisor = np.gcd(rate, 16000)
    theirs = signal.resample_poly(low.numpy(), 16000 // divisor, rate // divisor)
    np.testing.assert_allclose(found[inside].numpy(), theirs[inside], rtol=0, atol=3e-3)


def test_what_the_lower_rate_cannot_hold_is_gone():
    high = torch.from_numpy(tone(48000, 11000.0)).float()
    assert float(resampled(high, 48000, 16000)[200:-200].abs().max()) < 5e-3
    assert resampled(high, 16000, 16000) is high


def test_rows_bring_sounds_with_images_or_alone(tmp_path: Path):
    (tmp_path / "a.wav").write_bytes(wav(tone(8000, 440.0), rate=8000))
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [
        {"prompt": "what?", "audio": "a.wav", "answer": "b"},
        {"prompt": "where?", "images": ["a.png"]},
        {"prompt": "both?", "images": ["a.png"], "audio": "a.wav"},
        {"prompt": "listed?", "media": [{"modality": "audio", "role": "condition", "uri": "a.wav"}]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_rows(path)
    assert found[0].metadata == {"answer": "b"}
    inputs = inputs_of(found)
    sounds, images = inputs["audio"], inputs["image"]
    assert isinstance(sounds, Audios) and sounds.sample_rate == 16000
    assert sounds.lengths.tolist() == [8000, 0, 8000, 8000]
    assert isinstance(images, ImageLists) and [len(each) for each in images.images] == [0, 1, 1, 0]


BROKEN = [
    (b"not a sound", "cannot be read as a WAV file of integer samples"),
    (wav(np.zeros(0)), "is empty"),
    (None, "does not exist"),
]


@pytest.mark.parametrize(("data", "message"), BROKEN)
def test_a_broken_sound_is_named_with_its_line(tmp_path: Path, data: bytes | None, message: str):
    if data is not None:
        (tmp_path / "a.wav").write_bytes(data)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "what?", "audio": "a.wav"}))
    with pytest.raises(DataError, match=f"rows.jsonl:1: the sound a.wav {message}"):
        read_rows(path)


def test_a_prompt_hears_one_sound():
    with pytest.raises(DataError, match="a prompt has 2 sounds"):
        prompt_sounds([[ref(b""), ref(b"")]])
    assert inputs_of([PromptRow("a", "a")]).keys() == {"text"}
