"""Rollouts on disk: one safetensors file holds a response and, if wanted, the request that it answers.

The header's metadata holds the structure as JSON, the body holds the tensors, and long lists of numbers. Nothing is
pickled: a file names only classes of the lists below, so reading one never runs code that the file brought along.

    save_rollout("dump.safetensors", resp, req)
    resp, req = load_rollout("dump.safetensors")
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import importlib
import json
import math
import os
import stat
import uuid
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.types.actions import ActionSegment
from unirl.types.conditions import (
    ExpertCondition,
    ImageEmbedCondition,
    ImageLatentCondition,
    ImagePatchCondition,
    PromptCondition,
    TextEmbedCondition,
    TextTokenCondition,
)
from unirl.types.errors import ConfigError, ContractError, DataError
from unirl.types.media import Audios, Embeddings, ImageLists, Images, Modality, SizedImages, Texts, Videos
from unirl.types.messages import Message, ShownImage
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import (
    ActionSamplingParams,
    ARSamplingParams,
    BaseSamplingParams,
    DiffusionSamplingParams,
    StagedSamplingParams,
)
from unirl.types.segments import LatentSegment, SegmentStatus, SizedLatents, TextSegment, UnfinishedSteps

FORMAT = "unirl-rollout"
VERSION = 1

_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *(Texts, Images, ImageLists, SizedImages, Videos, Audios, Embeddings),
        *(TextEmbedCondition, TextTokenCondition, PromptCondition, ImagePatchCondition, ExpertCondition),
        *(ImageLatentCondition, ImageEmbedCondition),
        *(TextSegment, LatentSegment, SizedLatents, ActionSegment, UnfinishedSteps),
        *(DiffusionPlan, RolloutReq, RolloutTrack, RolloutResp, RewardRequest, RewardResponse),
        *(BaseSamplingParams, DiffusionSamplingParams, ARSamplingParams, ActionSamplingParams, StagedSamplingParams),
        *(Message, ShownImage),
    )
}
_CLASSES_ELSEWHERE = {
    "BegunEpisode": "unirl.rollout.environments.begun",
    "Episode": "unirl.rollout.turns.episodes",
    "MalformedCall": "unirl.rollout.turns.calls",
    "ToolCall": "unirl.rollout.turns.calls",
    "Turn": "unirl.rollout.turns.calls",
    "UnfinishedEpisode": "unirl.rollout.turns.episodes",
    "Written": "unirl.rollout.turns.episodes",
}
"""Dataclass -> its module, which is imported when a file names it."""
_ENUMS: dict[str, type[Enum]] = {cls.__name__: cls for cls in (Modality, SegmentStatus)}

_DTYPES = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    + (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
)

# safetensors refuses to read a header above 100 MB; the rest is for the tensors' own entries.
_MAX_STRUCTURE_BYTES = 80_000_000

_LONG_LIST = 256
"""Numbers of a list that is stored as a tensor."""
_NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool}

_TAG = "$"


class _Writer:
    """Turns values into JSON and collects their tensors. The same tensor object is written once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._sources: list[Tensor] = []  # keeps the ids in _names from being reused
        self._storages: set[int] = set()

    def encode(self, value: Any, where: str) -> Any:
        """JSON of a value. Raises ContractError, naming the place, for what the format cannot hold."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
        if isinstance(value, Tensor):
            return {_TAG: "tensor", "name": self._add(value, where)}
        if kind is list:
            if (tensor := _as_tensor(value)) is not None:
                return {_TAG: "numbers", "name": self._add(tensor, where)}
            return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if kind in (tuple, torch.Size):
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return {_TAG: "tuple" if kind is tuple else "size", "items": items}
        if kind is dict:
            return {
                _TAG: "dict",
                "items": [
                    [self.encode(key, f"a key of {where}"), self.encode(item, f"{where}[{key!r}]")]
                    for key, item in value.items()
                ],
            }
        if _ENUMS.get(kind.__name__) is kind:
            return {_TAG: "enum", "type": kind.__name__, "name": value.name}
        if kind is bytes:
            return {_TAG: "bytes", "value": base64.b64encode(value).decode("ascii")}
        if _CLASSES.get(kind.__name__) is kind or _CLASSES_ELSEWHERE.get(kind.__name__) == kind.__module__:
            return {
                _TAG: "object",
                "type": kind.__name__,
                "fields": {
                    field.name: self.encode(getattr(value, field.name), f"{where}.{field.name}")
                    for field in dataclasses.fields(value)
                    if field.init
                },
            }
        fix = " Call params.resolved(rollout_id) first." if where.endswith(".scheduler") else ""
        raise ContractError(
            f"{where} holds a {kind.__module__}.{kind.__qualname__}, which a stored rollout cannot hold; "
            f"use None, bool, int, float, str, bytes, list, tuple, dict, tensors or the classes of unirl.types.{fix}"
        )

    def _add(self, tensor: Tensor, where: str) -> str:
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            raise ContractError(f"{where} is a {tensor.layout} tensor of {tensor.dtype}, which cannot be stored")
        name = f"t{len(self.tensors)}"
        data = tensor.detach().to("cpu").contiguous()
        storage = data.untyped_storage()
        if storage.data_ptr() in self._storages or storage.nbytes() != data.numel() * data.element_size():
            data = data.clone(memory_format=torch.contiguous_format)
        self._storages.add(data.untyped_storage().data_ptr())
        self.tensors[name] = data
        self._names[id(tensor)] = name
        self._sources.append(tensor)
        return name


def _as_tensor(values: list[Any]) -> Tensor | None:
    """A long list of numbers of one kind; None of any other."""
    if len(values) < _LONG_LIST or type(values[0]) not in _NUMBERS:
        return None
    kind = type(values[0])
    if any(type(value) is not kind for value in values):
        return None
    try:
        return torch.tensor(values, dtype=_NUMBERS[kind])
    except (OverflowError, ValueError):  # numbers beyond 64 bits
        return None


def save_rollout(path: str | os.PathLike[str], resp: RolloutResp, req: RolloutReq | None = None) -> None:
    """Write a response, and the request that it answers, to one file (replaced whole, or left as it was).

    Tensors are stored as they are, bit for bit, detached and without their device. The folder must exist.
    Raises ContractError if a value cannot be stored, e.g. an unresolved scheduler or a class of another package.
    """
    from safetensors.torch import save_file

    writer = _Writer()
    content: dict[str, Any] = {"resp": writer.encode(resp, "resp"), "req": writer.encode(req, "req")}
    content["checksums"] = {name: _tensor_checksum(tensor) for name, tensor in writer.tensors.items()}
    structure = json.dumps(content, allow_nan=False)
    if len(structure) > _MAX_STRUCTURE_BYTES:
        raise ContractError(
            f"the rollout's ids, texts and metadata take {len(structure)} bytes of JSON; a file holds at most "
            f"{_MAX_STRUCTURE_BYTES}. Store fewer samples per file or smaller metadata rows."
        )
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "structure": structure,
        "structure_checksum": _text_checksum(structure),
    }
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"no folder {target.parent} to store a rollout in; make it first")
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(writer.tensors, aside, metadata=metadata)
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def open_to_umask(folder: Path) -> None:
    """Give the safetensors files below a folder the mode that new files have there.

    safetensors writes by a temporary file of mode 0600, which others of a group or a server cannot read.
    """
    # The umask itself can only be read by changing it, for all threads.
    probe = folder / f".mode-{uuid.uuid4().hex}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*.safetensors"):
        path.chmod(mode)


def flatten_response(resp: RolloutResp) -> tuple[str, dict[str, Tensor]]:
    """A response as JSON and the tensors that it names, contiguous on the CPU. Raises as `save_rollout` does."""
    writer = _Writer()
    return json.dumps(writer.encode(resp, "resp"), allow_nan=False), writer.tensors


def rebuild_response(structure: str, tensors: dict[str, Tensor]) -> RolloutResp:
    """The response of `flatten_response`. Raises DataError for what is none."""
    resp = _decode(json.loads(structure), tensors, "a flattened response")
    if not isinstance(resp, RolloutResp):
        raise DataError(f"a flattened response holds {type(resp).__name__}")
    return resp


def load_rollout(path: str | os.PathLike[str]) -> tuple[RolloutResp, RolloutReq | None]:
    """What `save_rollout` wrote: the response and the request, or None where it was stored without one.

    Tensors are on the CPU and own their memory. Raises FileNotFoundError for a missing file and DataError, naming the
    file, for one that is truncated, changed, of another format or of an unknown version.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no stored rollout at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            metadata = opened.metadata() or {}
            _check_header(metadata, path)
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise DataError(f"{path} is truncated or not a safetensors file ({error}). Write it again.") from error
    structure = json.loads(metadata["structure"])
    checksums = structure["checksums"]
    changed = sorted(name for name in {*checksums, *tensors} if not _is_intact(name, checksums, tensors))
    if changed:
        raise DataError(f"{path} is damaged: tensors {changed[:5]} are not those that were stored. Write it again.")
    resp, req = (_decode(structure[part], tensors, path) for part in ("resp", "req"))
    if not isinstance(resp, RolloutResp) or not (req is None or isinstance(req, RolloutReq)):
        raise DataError(
            f"{path} holds {type(resp).__name__} and {type(req).__name__} instead of a response and request"
        )
    return resp, req


def _check_header(metadata: dict[str, str], path: Path) -> None:
    if metadata.get("format") != FORMAT:
        raise DataError(
            f"{path} is no stored rollout: its format is {metadata.get('format')!r} instead of {FORMAT!r}. "
            "Read files that save_rollout wrote."
        )
    if metadata.get("version") != str(VERSION):
        raise DataError(
            f"{path} has version {metadata.get('version')!r} of the rollout format; this unirl-types reads {VERSION}. "
            "Install the unirl-types that wrote it."
        )
    structure = metadata.get("structure")
    if structure is None or _text_checksum(structure) != metadata.get("structure_checksum"):
        raise DataError(f"{path} is damaged: its structure is missing or not the one that was stored. Write it again.")


def _text_checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _tensor_checksum(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().flatten().view(torch.uint8).numpy(), digest_size=16).hexdigest()


def _is_intact(name: str, checksums: dict[str, str], tensors: dict[str, Tensor]) -> bool:
    return name in tensors and checksums.get(name) == _tensor_checksum(tensors[name])


def _decode(value: Any, tensors: dict[str, Tensor], path: Path | str) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors, path) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        return _decode_tagged(value, tensors, path)
    except (KeyError, TypeError, ImportError, binascii.Error, ContractError, ConfigError) as error:
        what = value.get("type", value.get(_TAG))
        raise DataError(f"{path} holds a {what} that cannot be rebuilt: {error}") from error


def _decode_tagged(value: dict[str, Any], tensors: dict[str, Tensor], path: Path | str) -> Any:
    match value[_TAG]:
        case "float":
            return float(value["value"])
        case "tensor":
            return tensors[value["name"]]
        case "numbers":
            return tensors[value["name"]].tolist()
        case "bytes":
            return base64.b64decode(value["value"], validate=True)
        case "tuple":
            return tuple(_decode(item, tensors, path) for item in value["items"])
        case "size":
            return torch.Size(_decode(item, tensors, path) for item in value["items"])
        case "dict":
            return {_decode(key, tensors, path): _decode(item, tensors, path) for key, item in value["items"]}
        case "enum":
            return _ENUMS[value["type"]][value["name"]]
        case "object":
            fields = {name: _decode(item, tensors, path) for name, item in value["fields"].items()}
            return _built(value["type"], fields)
        case other:
            raise DataError(f"{path} holds an unknown tag {other!r}")


def _built(name: str, fields: dict[str, Any]) -> Any:
    """The object of a class of the format; of files from before stages were a mapping, too."""
    if name == "ComposedSamplingParams":
        return StagedSamplingParams(stages={"text": fields["ar"], "image": fields["diffusion"]})
    if name == "RolloutReq":
        fields.pop("stage_config", None)
    if name in _CLASSES_ELSEWHERE:
        return getattr(importlib.import_module(_CLASSES_ELSEWHERE[name]), name)(**fields)
    return _CLASSES[name](**fields)
