"""The binary body of POST /score: one safetensors file, so any safetensors library can write or read it.

Tensors: `media.<i>` of sample i, image [H, W, 3] or video [T, H, W, 3], U8 or F32 in [0, 1]; `source.<i>` [H, W, 3];
`sound.<i>` of a video, or that sample i is, [L] or [L, C], F32; `source_sound.<i>` of its prompt. A generated text
stands in the header. Metadata: one entry `unirl_score`, a JSON text
    {"version": 1, 2 or 3, "rewards": [name, ...] or [[name, ...] for every sample],
     "samples": [{"id", "kind": image, video, text or audio, "prompt"?, "completion"?, "group_id"?, "fps"?,
                  "sound_rate"?, "source_sound_rate"?, "metadata"?}]}
Version 2 has sounds of videos, version 3 also sounds alone and of prompts; a body has the lowest that says it. Readers
refuse higher ones, so that none scores a sample without its sound. Pixels and sounds are neither
compressed nor copied into text: the lossless codecs for sound hold integers and would round floats, and a second of it
is smaller than a frame. Reading makes views of the body.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unirl.reward.wire.json_body import checked_fps, checked_rewards, checked_text, parsed_json
from unirl.reward.wire.media import Budget, check_size, check_sound
from unirl.reward.wire.samples import Limits, SchemaError, ScoreCall, WireSample
from unirl.reward.wire.wav import MAX_SOUND_RATE
from unirl.types.errors import DataError

BINARY_TYPE = "application/vnd.unirl.score+safetensors"
VERSION = 3

_KEY = "unirl_score"
_DTYPES = {"U8": np.dtype("uint8"), "F32": np.dtype("<f4")}
_MAX_HEADER_BYTES = 64 * 1024**2


def encode_binary(samples: Sequence[WireSample], rewards: Sequence[str] | Sequence[Sequence[str]]) -> list[memoryview]:
    """The parts of the body, to be written one after the other (`b"".join` makes one of them); media are not copied.

    rewards: names asked of every sample, or a list of names for each sample.
    """
    tensors: dict[str, Any] = {}
    parts: list[memoryview] = []
    offset = 0
    for i, sample in enumerate(samples):
        for name, array in _named_arrays(sample).items():
            if isinstance(array, np.ndarray):
                end = offset + array.nbytes
                code = "U8" if array.dtype == np.uint8 else "F32"
                tensors[f"{name}.{i}"] = {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, end]}
                # As bytes by NumPy: a memoryview of nothing, a video's empty sound, cannot be cast.
                parts.append(np.ascontiguousarray(array, dtype=_DTYPES[code]).reshape(-1).view(np.uint8).data)
                offset = end
    names = [name if isinstance(name, str) else list(name) for name in rewards]
    content = {
        "version": max(map(_version, samples), default=1),
        "rewards": names,
        "samples": [_entry(sample) for sample in samples],
    }
    header = json.dumps({"__metadata__": {_KEY: json.dumps(content)}, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    return [memoryview(len(header).to_bytes(8, "little") + header), *parts]


def _named_arrays(sample: WireSample) -> dict[str, np.ndarray | str | None]:
    """The tensors of a sample, by the name before its index."""
    made = {"sound": sample.media} if sample.kind == "audio" else {"media": sample.media, "sound": sample.sound}
    return {**made, "source": sample.source, "source_sound": sample.source_sound}


def _version(sample: WireSample) -> int:
    """The first version of this body that holds such a sample."""
    if sample.kind == "audio" or sample.source_sound is not None:
        return VERSION
    return 1 if sample.sound is None else 2


def decode_binary(body: bytes | memoryview, limits: Limits) -> ScoreCall:
    """The samples of a body, their pixels and sounds read-only views of it.

    Raises SchemaError for what is not such a file, DataError for values beyond the limits; both name the place.
    """
    view = memoryview(body)
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or not 2 <= length <= min(len(view) - 8, _MAX_HEADER_BYTES):
        raise SchemaError(f"the body is not a safetensors file: {len(view)} bytes, header of {length}")
    header = parsed_json(view[8 : 8 + length], limits, "the safetensors header")
    outer = header.pop("__metadata__", None)
    text = outer.get(_KEY) if isinstance(outer, dict) else None
    if not isinstance(text, str):
        raise SchemaError(f"the safetensors metadata has no text {_KEY}")
    content = parsed_json(text.encode("utf-8", "surrogatepass"), limits, _KEY)
    if content.get("version") not in range(1, VERSION + 1):
        shown = str(content.get("version"))[:40]
        raise SchemaError(f"{_KEY}.version is {shown}; this side speaks versions 1 to {VERSION}")
    entries = content.get("samples")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SchemaError(f"{_KEY}.samples must be a list of objects")
    if not 1 <= len(entries) <= limits.max_samples:
        raise DataError(f"{_KEY}.samples has {len(entries)} entries; 1 to {limits.max_samples} fit into one body")
    arrays = _arrays(header, view[8 + length :], Budget(limits))
    samples = [_sample(entry, i, arrays, limits) for i, entry in enumerate(entries)]
    if arrays:
        raise SchemaError(f"tensors {sorted(arrays)[:4]} belong to no sample")
    return ScoreCall(samples, _rewards(content.get("rewards"), len(samples)))


def _entry(sample: WireSample) -> dict[str, Any]:  # Any: JSON values
    optional = {
        "prompt": sample.prompt,
        "completion": sample.media if isinstance(sample.media, str) else None,
        "group_id": sample.group_id,
        "fps": sample.fps,
        "sound_rate": sample.sample_rate,
        "source_sound_rate": sample.source_sample_rate,
        "metadata": sample.metadata,
    }
    return {"id": sample.id, "kind": sample.kind} | {key: v for key, v in optional.items() if v is not None}


def _arrays(header: dict[str, Any], data: memoryview, budget: Budget) -> dict[str, np.ndarray]:  # Any: JSON values
    """Views of all tensors. They must cover `data` without gap or overlap, as the format demands."""
    entries = sorted((_checked(name, entry) for name, entry in header.items()), key=lambda found: found[3:])
    arrays = {}
    offset = 0
    for name, dtype, shape, begin, end in entries:
        num_bytes = math.prod(shape) * dtype.itemsize
        if begin != offset or end - begin != num_bytes or end > len(data):
            raise SchemaError(f"tensor {name[:40]}: bytes {begin} to {end} do not hold {shape} or leave a gap")
        if not _is_sound(name):
            check_size(shape[-2], shape[-3], name, budget.limits)
        if len(shape) == 4 and not 1 <= shape[0] <= budget.limits.max_frames:
            raise DataError(f"{name} has {shape[0]} frames; the limit is max_frames = {budget.limits.max_frames}")
        budget.take(num_bytes, name)
        arrays[name] = np.frombuffer(data[begin:end], dtype=dtype).reshape(shape)
        offset = end
    if offset != len(data):
        raise SchemaError(f"the tensors cover {offset} of {len(data)} bytes")
    return arrays


def _checked(name: str, entry: Any) -> tuple[str, np.dtype, list[int], int, int]:  # Any: JSON values
    shown = name[:40]
    dtypes = ("F32",) if _is_sound(name) else ("U8", "F32")
    if not isinstance(entry, dict) or entry.get("dtype") not in dtypes:
        raise SchemaError(f"tensor {shown} must have dtype {' or '.join(dtypes)}")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if _is_sound(name):
        if not _are_sizes(shape) or len(shape) not in (1, 2) or 0 in shape[1:]:
            raise SchemaError(f"tensor {shown} must have shape [L] or [L, C]")
    elif not _are_sizes(shape) or len(shape) not in (3, 4) or shape[-1] != 3:
        raise SchemaError(f"tensor {shown} must have shape [H, W, 3] or [T, H, W, 3]")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise SchemaError(f"tensor {shown} must have two data_offsets")
    return name, _DTYPES[entry["dtype"]], shape, offsets[0], offsets[1]


def _is_sound(name: str) -> bool:
    return name.startswith(("sound.", "source_sound."))


def _are_sizes(value: Any) -> bool:  # Any: JSON values
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**48 for item in value)


def _sample(entry: dict[str, Any], index: int, arrays: dict[str, np.ndarray], limits: Limits) -> WireSample:
    where = f"{_KEY}.samples[{index}]"
    kind = entry.get("kind")
    if kind not in ("image", "video", "text", "audio"):
        raise SchemaError(f"{where}.kind must be image, video, text or audio, got {str(kind)[:40]}")
    sound, rate = _sound(entry, index, arrays, limits)
    source_sound, source_rate = _sound(entry, index, arrays, limits, "source_sound")
    if sound is not None and kind not in ("video", "audio"):
        raise SchemaError(f"sound.{index} belongs to a sample of kind {kind}; videos and audio alone have sounds")
    if kind == "text":
        media = checked_text(entry.get("completion"), f"{where}.completion", limits)
    else:
        media = sound if kind == "audio" else arrays.pop(f"media.{index}", None)
    source = arrays.pop(f"source.{index}", None)
    if media is None:
        lacked = {"text": "completion", "audio": f"tensor sound.{index}"}.get(kind, f"tensor media.{index}")
        raise SchemaError(f"{where} has no {lacked}")
    if isinstance(media, np.ndarray) and kind != "audio" and media.ndim != (4 if kind == "video" else 3):
        raise SchemaError(f"media.{index} of kind {kind} has shape {media.shape}")
    if source is not None and source.ndim != 3:
        raise SchemaError(f"source.{index} must have shape [H, W, 3], got {source.shape}")
    metadata = entry.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise SchemaError(f"{where}.metadata must be an object")
    name = checked_text(entry.get("id"), f"{where}.id", limits)
    return WireSample(
        id=str(index) if name is None else name,
        kind=kind,
        media=media,
        prompt=checked_text(entry.get("prompt"), f"{where}.prompt", limits),
        source=source,
        group_id=checked_text(entry.get("group_id"), f"{where}.group_id", limits),
        fps=checked_fps(entry.get("fps"), f"{where}.fps"),
        sound=sound if kind == "video" else None,
        sample_rate=rate,
        source_sound=source_sound,
        source_sample_rate=source_rate,
        metadata=metadata,
    )


def _sound(
    entry: dict[str, Any],  # Any: JSON values
    index: int,
    arrays: dict[str, np.ndarray],
    limits: Limits,
    name: str = "sound",
) -> tuple[np.ndarray | None, int | None]:
    """A sound of a sample and its samples per second, where either is known."""
    where = f"{_KEY}.samples[{index}]"
    sound, rate = arrays.pop(f"{name}.{index}", None), entry.get(f"{name}_rate")
    if sound is None and rate is not None:
        raise SchemaError(f"{where} has a {name}_rate and no tensor {name}.{index}")
    if rate is None or sound is None:
        return sound, None
    if type(rate) is not int or not 1 <= rate <= MAX_SOUND_RATE:
        raise SchemaError(f"{where}.{name}_rate must be a whole number of 1 to {MAX_SOUND_RATE} samples per second")
    check_sound(len(sound), rate, f"{name}.{index}", limits)
    return sound, rate


def _rewards(names: Any, num_samples: int) -> list[tuple[str, ...]]:  # Any: JSON values
    where = f"{_KEY}.rewards"
    if not isinstance(names, list):
        raise SchemaError(f"{where} must be a list")
    if names and all(isinstance(item, list) for item in names):
        if len(names) != num_samples:
            raise SchemaError(f"{where} has {len(names)} lists for {num_samples} samples")
        return [checked_rewards(item, f"{where}[{i}]") for i, item in enumerate(names)]
    return [checked_rewards(names, where)] * num_samples
