"""Sounds inside JSON: WAV files, written with float32 samples and read in every usual width.

Legend: L samples of a waveform, C channels.
"""

from __future__ import annotations

import struct

import numpy as np
import pybase64

from unirl.reward.wire.media import Budget, check_sound
from unirl.types.errors import ContractError, DataError

MAX_SOUND_RATE = 10**6

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MAX_DATA_BYTES = 2**32 - 2**16
"""The sizes in a WAV file have 32 bits."""
_DTYPES = {(_PCM, 2): "<i2", (_PCM, 4): "<i4", (_FLOAT, 4): "<f4", (_FLOAT, 8): "<f8"}


def is_wav(data: bytes) -> bool:
    """True if a file begins as WAV does."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def wav(waveform: np.ndarray, rate: int | None, name: str) -> str:
    """base64 WAV of float32 [L] or [L, C], which keeps every bit of it; of which sample, for messages.

    Raises ContractError for a sound without a rate, which such a file must have, or too long for one.
    """
    if rate is None:
        raise ContractError(
            f"sample {name}: its sound has no sample_rate, which JSON must say. Send it in the binary body (transport: "
            "binary), or set the rate."
        )
    num_channels = 1 if waveform.ndim == 1 else waveform.shape[1]
    samples = np.ascontiguousarray(waveform, dtype="<f4").tobytes()
    if len(samples) > _MAX_DATA_BYTES:
        raise ContractError(
            f"sample {name}: its sound has {len(samples)} bytes, a WAV file at most {_MAX_DATA_BYTES}. Send it in the "
            "binary body (transport: binary)."
        )
    kind = struct.pack(
        "<HHIIHHH", _FLOAT, num_channels, rate, rate * num_channels * 4 % 2**32, num_channels * 4 % 2**16, 32, 0
    )
    chunks = b"".join(
        name + struct.pack("<I", len(content)) + content
        for name, content in ((b"fmt ", kind), (b"fact", struct.pack("<I", len(waveform))), (b"data", samples))
    )
    return pybase64.b64encode_as_string(b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks)


def decoded_wav(data: bytes, where: str, budget: Budget) -> tuple[np.ndarray, int]:
    """float32 [L], or [L, C] of several channels, and samples per second.

    Floats of 32 bits keep their bits, integers of n bits are divided by 2^(n - 1), as exact as float32 holds them.
    Raises DataError for another file, and for a sound beyond the limits.
    """
    kind, samples = _chunks(data, where)
    if len(kind) < 16:
        raise DataError(f"{where} is a damaged WAV file: its format has {len(kind)} bytes of 16")
    tag, num_channels, rate, _, block, bits = struct.unpack("<HHIIHH", kind[:16])
    if tag == _EXTENSIBLE and len(kind) >= 26:
        tag = struct.unpack("<H", kind[24:26])[0]
    width = bits // 8
    if not num_channels or block != num_channels * width or (tag, width) not in {*_DTYPES, (_PCM, 1), (_PCM, 3)}:
        raise DataError(
            f"{where} has {num_channels} channels of {bits} bits in format {tag}; send WAV of 8, 16, 24 or 32 bits, or "
            "of 32 or 64 bits floating"
        )
    if not 1 <= rate <= MAX_SOUND_RATE:
        raise DataError(f"{where} has {rate} samples per second; it must have 1 to {MAX_SOUND_RATE}")
    length = len(samples) // block
    check_sound(length, rate, where, budget.limits)
    budget.take(4 * length * num_channels, where)
    numbers = _numbers(samples[: length * block], tag, width)
    return (numbers if num_channels == 1 else numbers.reshape(length, num_channels)), rate


def _chunks(data: bytes, where: str) -> tuple[bytes, bytes]:
    """Contents of the format and of the data."""
    found: dict[bytes, bytes] = {}
    start = 12
    while start + 8 <= len(data) and b"data" not in found:
        size = int.from_bytes(data[start + 4 : start + 8], "little")
        found.setdefault(data[start : start + 4], data[start + 8 : start + 8 + size])
        if start + 8 + size > len(data):
            raise DataError(f"{where} is a damaged WAV file: it ends before its {size} bytes do")
        start += 8 + size + size % 2
    missing = [name for name in (b"fmt ", b"data") if name not in found]
    if missing:
        raise DataError(f"{where} is a damaged WAV file: it has no part {missing[0].decode().strip()!r}")
    return found[b"fmt "], found[b"data"]


def _numbers(data: bytes, tag: int, width: int) -> np.ndarray:
    """float32, flat. Integers of one byte are unsigned, others signed and little-endian."""
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        three = np.zeros((len(data) // 3, 4), np.uint8)
        three[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return three.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)
    numbers = np.frombuffer(data, _DTYPES[tag, width])
    if tag == _FLOAT:
        with np.errstate(over="ignore"):
            return numbers.astype(np.float32)
    return (numbers.astype(np.float64) / 2 ** (8 * width - 1)).astype(np.float32)
