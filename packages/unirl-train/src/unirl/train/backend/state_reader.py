"""Reads the `state/` folder of a checkpoint without executing anything that it holds.

torch.distributed.checkpoint keeps its list of tensors in `.metadata`, which is a pickle: loaded as it is, a file from
a stranger runs whatever it names. Here only the names that DCP writes are known, and even those are not constructed:
the pickle becomes a tree of inert records, from which the list of tensors is built and checked. The tensors themselves
are read by DCP with `weights_only=True`; entries that are no tensors, which DCP would unpickle, are refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what FileSystemReader looks tensors up by
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from unirl.types.errors import CheckpointError

_DCP = "torch.distributed.checkpoint"
_KNOWN = frozenset(
    {
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
    }
)
"""What DCP 2.x names in `.metadata`, besides torch's dtypes."""


class StateReader(FileSystemReader):
    """DCP's reader of a folder, for folders that are not trusted.

    `read_metadata` raises CheckpointError if `.metadata` names anything foreign, with that name, or is no list of
    tensors in files of this folder.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # Any: DCP's own signature
        """The tensors of the folder and where they lie."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                found = _metadata(_RecordUnpickler(file).load())
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # bytes that are no pickle raise almost anything
            raise CheckpointError(
                f"{path} is not the metadata of a checkpoint ({type(error).__name__}: {error}). Use another checkpoint."
            ) from error
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


class _Record:
    """Stands for an object of the pickle: what it was made of, and nothing that acts."""

    kind: str
    args: tuple[Any, ...]  # Any: whatever the file says, checked by those who read it
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _RecordUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._kinds: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:  # Any: as declared by pickle
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) not in _KNOWN:
            raise CheckpointError(
                f"its .metadata names {module}.{name}, which no checkpoint needs and which could run code; nothing was "
                "loaded. Use a checkpoint whose origin you know."
            )
        # Made anew for every file, because a pickle can set attributes of the classes that it is given.
        return self._kinds.setdefault((module, name), type(name, (_Record,), {"kind": name}))


def _metadata(found: object) -> Metadata:
    state = _fields(found, "Metadata")
    return Metadata(
        state_dict_metadata={_text(name): _tensor(name, entry) for name, entry in state["state_dict_metadata"].items()},
        storage_data={_index(key): _place(place) for key, place in state["storage_data"].items()},
        version=state.get("version"),
    )


def _tensor(name: str, entry: object) -> TensorStorageMetadata:
    if isinstance(entry, _Record) and entry.kind == "BytesStorageMetadata":
        raise CheckpointError(f"its entry {name} is a pickled object and not a tensor; nothing was loaded")
    state = _fields(entry, "TensorStorageMetadata")
    properties = state["properties"]
    if not isinstance(properties, _Record) or properties.kind != "TensorProperties":
        raise TypeError(f"the properties of {name} are {properties!r}")
    dtype = properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the dtype of {name} is {dtype!r}")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(state["size"]),
        chunks=[ChunkStorageMetadata(offsets=_size(each["offsets"]), sizes=_size(each["sizes"])) for each in chunks],
    )


def _index(found: object) -> MetadataIndex:
    state = _fields(found, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(_text(state["fqn"]), None if offset is None else _size(offset), state.get("index"))


def _place(found: object) -> _StorageInfo:
    state = _fields(found, "_StorageInfo")
    file = _text(state["relative_path"])
    if file in ("", ".", "..") or Path(file).name != file:
        raise CheckpointError(f"its .metadata points to {file!r}, outside its folder; nothing was loaded")
    if state.get("transform_descriptors"):
        raise TypeError(f"{file} is compressed, which this trainer never writes")
    return _StorageInfo(file, int(state["offset"]), int(state["length"]))


def _fields(found: object, kind: str) -> dict[str, Any]:  # Any: as in _Record
    if not isinstance(found, _Record) or found.kind != kind or not isinstance(found.state, dict):
        raise TypeError(f"expected a {kind}, found {found!r}")
    return found.state


def _size(found: object) -> torch.Size:
    if not isinstance(found, _Record) or found.kind != "Size":
        raise TypeError(f"expected a torch.Size, found {found!r}")
    return torch.Size(found.args[0])


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError(f"expected a text, found {found!r}")
    return found
