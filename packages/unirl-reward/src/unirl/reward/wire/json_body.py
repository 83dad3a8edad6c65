"""The JSON body of POST /score: what clients in any language write by hand.

    {"requests": [{"history": [{"text", "image_b64"? , "video_b64"? , "video_path"?}, ...],
                   "required_rewards": [name, ...], "metadata"?: {...}}]}

The last turn holds what was generated; an earlier one holds the input image of an edit. Beyond that a turn may have
`completion`, a generated text, `audio_b64`, a sound, and `fps`, and a request `id` and `group_id`. The sound of a video
is that of its file. An earlier turn may also hold the sound of the prompt; image and sound have a turn each, so that a
server from before sounds refuses them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from unirl.reward.wire.media import (
    Budget,
    animated_png,
    decoded_base64,
    decoded_image,
    decoded_sound,
    decoded_video,
    png,
)
from unirl.reward.wire.samples import Kind, Limits, SchemaError, ScoreCall, WireSample
from unirl.reward.wire.wav import decoded_wav, is_wav, wav
from unirl.types.errors import ContractError, DataError

JSON_TYPE = "application/json"

_PIECE_BYTES = 2**20


def encode_json(samples: Sequence[WireSample], rewards: Sequence[str]) -> bytes:
    """The body that asks for `rewards` of every sample; images as PNG, videos as animated PNG, sounds as WAV of
    float32, all lossless.

    Raises ContractError for float32 pixels, which PNG would round, for sounds of videos, and for others without a
    rate.
    """
    return json.dumps({"requests": [_entry(sample, rewards) for sample in samples]}).encode()


def decode_json(
    body: bytes | memoryview,
    limits: Limits,
    read_video: Callable[[str], bytes] | None = None,
    is_scored: Callable[[Kind, tuple[str, ...]], bool] | None = None,
) -> ScoreCall:
    """The samples of a body.

    read_video: reads a `video_path`, raising DataError if that is not allowed; None refuses the field. is_scored:
    whether any of some rewards takes media of a kind; what none takes is not decoded. None decodes all. Raises
    SchemaError for a missing field or a wrong type, DataError for other wrong values; both name the place.
    """
    requests = _field(parsed_json(body, limits, "the body"), "requests", list, "the body")
    if not 1 <= len(requests) <= limits.max_samples:
        raise DataError(f"requests has {len(requests)} entries; 1 to {limits.max_samples} fit into one body")
    budget = Budget(limits)
    samples, rewards = [], []
    for i, entry in enumerate(requests):
        where = f"requests[{i}]"
        _require(entry, dict, where)
        turns = _turns(entry, where, budget, read_video)
        kind = turns[-1].kind()
        names = checked_rewards(_field(entry, "required_rewards", list, where), f"{where}.required_rewards")
        rewards.append(names)
        samples.append(_sample(entry, i, turns, limits, is_decoded=is_scored is None or is_scored(kind, names)))
    return ScoreCall(samples, rewards)


def parsed_json(text: bytes | memoryview, limits: Limits, what: str) -> dict[str, Any]:  # Any: JSON values
    """A JSON object. Raises SchemaError for anything else, or for one with more values than the limit."""
    # Two bytes of text can become a list of 56 bytes, so values are counted before they are parsed.
    if _num_marks(text) > limits.max_json_nodes:
        raise SchemaError(f"{what} has more than max_json_nodes = {limits.max_json_nodes} values")
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # The standard library takes more (half of a surrogate pair, UTF-16) and says better what is wrong.
        found = _parsed_slowly(bytes(text), what)
    _require(found, dict, what)
    return found


def _parsed_slowly(text: bytes, what: str) -> Any:  # Any: JSON values
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{what} is not JSON: {error}") from error


def _num_marks(text: bytes | memoryview) -> int:
    """Commas and opening brackets. NumPy compares many bytes at a time, which bytes.count does not."""
    data = np.frombuffer(text, np.uint8)
    pieces = (data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))
    return sum(int(np.count_nonzero(piece == mark)) for piece in pieces for mark in b",[{")


def checked_rewards(names: list[Any], where: str) -> tuple[str, ...]:  # Any: JSON values
    """Names of rewards, each once. Raises DataError for none, SchemaError for what is no string."""
    for name in names:
        _require(name, str, where)
    if not names:
        raise DataError(f"{where} is empty; name at least one reward")
    return tuple(dict.fromkeys(names))


def checked_text(value: Any, where: str, limits: Limits) -> str | None:  # Any: JSON values
    """A text or None. Raises SchemaError for another type and DataError for one that is too long."""
    if value is None:
        return None
    _require(value, str, where)
    if len(value) > limits.max_text_chars:
        raise DataError(f"{where} has {len(value)} characters, more than max_text_chars = {limits.max_text_chars}")
    return value


def checked_fps(value: Any, where: str) -> float | None:  # Any: JSON values
    """Frames per second or None. Raises SchemaError for what is no positive number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
        raise SchemaError(f"{where} must be a positive number of frames per second, got {str(value)[:40]}")
    return float(value)


def _entry(sample: WireSample, rewards: Sequence[str]) -> dict[str, Any]:  # Any: JSON values
    last: dict[str, Any] = {} if sample.prompt is None else {"text": sample.prompt}
    if sample.media is None:
        raise ContractError(f"sample {sample.id} was not decoded and cannot be sent")
    if sample.sound is not None:
        raise ContractError(
            f"sample {sample.id}: JSON carries no sound of a video. Send it in the binary body (transport: binary)."
        )
    if isinstance(sample.media, str):
        last["completion"] = sample.media
    elif sample.kind == "image":
        last["image_b64"] = png(_bytes_only(sample.media, sample.id))
    elif sample.kind == "audio":
        last["audio_b64"] = wav(sample.media, sample.sample_rate, sample.id)
    else:
        last["video_b64"] = animated_png(_bytes_only(sample.media, sample.id))
        if sample.fps is not None:
            last["fps"] = sample.fps
    history = [last]
    if sample.source_sound is not None:
        sound = wav(sample.source_sound, sample.source_sample_rate, sample.id)
        history.insert(0, {"text": "", "audio_b64": sound})
    if sample.source is not None:
        history.insert(0, {"text": "", "image_b64": png(_bytes_only(sample.source, sample.id))})
    entry = {"id": sample.id, "history": history, "required_rewards": list(rewards)}
    optional = {"group_id": sample.group_id, "metadata": sample.metadata}
    return entry | {key: value for key, value in optional.items() if value is not None}


def _bytes_only(pixels: np.ndarray, name: str) -> np.ndarray:
    if pixels.dtype != np.uint8:
        raise ContractError(
            f"sample {name}: JSON carries 8-bit PNG, which would round its float32 pixels. Send them in the binary "
            "body, or ask for pixels='uint8' where rounding is meant."
        )
    return pixels


def _turns(
    entry: dict[str, Any],  # Any: JSON values
    where: str,
    budget: Budget,
    read_video: Callable[[str], bytes] | None,
) -> list[_Turn]:
    history = _field(entry, "history", list, where)
    if not 1 <= len(history) <= 3:
        raise DataError(
            f"{where}.history has {len(history)} turns; it takes the generated one, and before it one with the input "
            "image of an edit and one with the sound of the prompt"
        )
    return [_Turn(turn, f"{where}.history[{i}]", budget, read_video) for i, turn in enumerate(history)]


def _sample(
    entry: dict[str, Any],  # Any: JSON values
    index: int,
    turns: list[_Turn],
    limits: Limits,
    *,
    is_decoded: bool,
) -> WireSample:
    where = f"requests[{index}]"
    given = _inputs(turns[:-1]) if is_decoded else {}
    sound, rate = given["audio_b64"].sound() if "audio_b64" in given else (None, None)
    made = turns[-1].generated() if is_decoded else _Made(None)
    # An edit's instruction may stand at either turn.
    texts = [turn.text for turn in reversed(turns) if turn.text] or [turns[-1].text]
    metadata = entry.get("metadata")
    if metadata is not None:
        _require(metadata, dict, f"{where}.metadata")
    name = checked_text(entry.get("id"), f"{where}.id", limits)
    return WireSample(
        id=str(index) if name is None else name,
        kind=turns[-1].kind(),
        media=made.media,
        prompt=texts[0],
        source=given["image_b64"].image() if "image_b64" in given else None,
        group_id=checked_text(entry.get("group_id"), f"{where}.group_id", limits),
        fps=made.fps,
        sound=made.sound,
        sample_rate=made.sample_rate,
        source_sound=sound,
        source_sample_rate=rate,
        metadata=metadata,
    )


def _inputs(turns: Sequence[_Turn]) -> dict[str, _Turn]:
    """The turns before the last one by what they hold: an input image, a sound."""
    found: dict[str, _Turn] = {}
    for turn in turns:
        key = turn.given_medium()
        if key in found:
            raise DataError(f"{turn.where} has a second {key}; a prompt has one image and one sound")
        found[key] = turn
    return found


class _Made(NamedTuple):
    """What a turn holds, as `WireSample` has it."""

    media: np.ndarray | str | None
    fps: float | None = None
    sound: np.ndarray | None = None
    sample_rate: int | None = None


class _Turn:
    """One turn of a history."""

    def __init__(
        self,
        turn: Any,  # Any: JSON values
        where: str,
        budget: Budget,
        read_video: Callable[[str], bytes] | None,
    ) -> None:
        _require(turn, dict, where)
        self._turn = turn
        self.where = where
        self._budget = budget
        self._read_video = read_video
        self.text = self._text("text")

    def _text(self, key: str) -> str | None:
        return checked_text(self._turn.get(key), f"{self.where}.{key}", self._budget.limits)

    def _data(self, key: str) -> bytes | None:
        value = self._turn.get(key)
        if value is None:
            return None
        _require(value, str, f"{self.where}.{key}")
        return decoded_base64(value, f"{self.where}.{key}")

    def image(self) -> np.ndarray | None:
        data = self._data("image_b64")
        return None if data is None else decoded_image(data, f"{self.where}.image_b64", self._budget)

    def sound(self) -> tuple[np.ndarray, int]:
        data = self._data("audio_b64") or b""
        decode = decoded_wav if is_wav(data) else decoded_sound
        return decode(data, f"{self.where}.audio_b64", self._budget)

    def given_medium(self) -> str:
        """image_b64 or audio_b64, of a turn before the last one."""
        given = [key for key in _GIVEN if self._turn.get(key) is not None]
        if len(given) != 1:
            raise DataError(
                f"{self.where} must have image_b64 or audio_b64: before the last turn stand an input image and the "
                f"sound of the prompt, each in its turn; it has {given}"
            )
        return given[0]

    def _given(self) -> str:
        given = [key for key in _MEDIA if self._turn.get(key) is not None]
        if len(given) != 1:
            raise DataError(f"{self.where} must have exactly one of {', '.join(_MEDIA)}; it has {given}")
        return given[0]

    def kind(self) -> Kind:
        return _MEDIA[self._given()]

    def generated(self) -> _Made:
        given = self._given()
        if given == "image_b64":
            return _Made(self.image())
        if given == "completion":
            return _Made(self._text("completion"))
        if given == "audio_b64":
            waveform, rate = self.sound()
            return _Made(waveform, sample_rate=rate)
        data = self._data("video_b64") if given == "video_b64" else self._from_path()
        clip = decoded_video(data or b"", f"{self.where}.{given}", self._budget)
        fps = checked_fps(self._turn.get("fps"), f"{self.where}.fps") or clip.fps
        return _Made(clip.frames, fps, clip.sound, clip.sample_rate)

    def _from_path(self) -> bytes:
        path = self._text("video_path")
        if self._read_video is None or path is None:
            raise DataError(f"{self.where}.video_path: this server reads no files; send video_b64")
        return self._read_video(path)


_MEDIA: dict[str, Kind] = {
    "image_b64": "image",
    "video_b64": "video",
    "video_path": "video",
    "completion": "text",
    "audio_b64": "audio",
}
_GIVEN = ("image_b64", "audio_b64")


def _require(value: Any, kind: type, where: str) -> None:  # Any: JSON values
    if not isinstance(value, kind):
        raise SchemaError(f"{where} must be {_NAMES[kind]}, got {type(value).__name__}")


_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}


def _field(owner: dict[str, Any], key: str, kind: type, where: str) -> Any:  # Any: JSON values
    if key not in owner:
        raise SchemaError(f"{where} has no {key}")
    _require(owner[key], kind, f"{where}.{key}")
    return owner[key]


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")
