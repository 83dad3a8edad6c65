"""Weights in safetensors files, read in parts: each rank of a sharded model reads what it keeps."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from unirl.types.errors import CheckpointError
from unirl.types.protocols.models import StoredTensor

logger = logging.getLogger(__name__)

MAPPED_BYTES = 2**26
"""Bytes that are read of mapped files before these are closed: pages that were read count as memory until then."""
_MOST_NAMES = 8

Box = tuple[slice, ...]
"""A slice with start and stop per dimension."""


class Source(StoredTensor, Protocol):
    """Where the values of a tensor of the model come from."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class NoValues:
    """A tensor of a model in a rehearsal, which has none."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box) -> Tensor:
        """A zero in the shape of a part."""
        sizes = [part.stop - part.start for part in box]
        return torch.zeros((), dtype=self.dtype).expand(sizes)


def without_values(module: nn.Module) -> dict[str, NoValues]:
    """The tensors of a module's state in a rehearsal."""
    return {name: NoValues(tuple(tensor.shape), tensor.dtype) for name, tensor in module.state_dict().items()}


class TensorFiles:
    """Tensors by name, in several files that are opened when they are read."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(files)
        """The file of each tensor."""
        self._opened: dict[Path, Any] = {}  # Any: safetensors types nothing that it opens
        self._stack = ExitStack()
        self._num_bytes = 0

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor. Raises CheckpointError for a file that cannot be read, or lacks one of its tensors."""
        found = {}
        for name, file in self.files.items():
            try:
                found[name] = tuple(self._slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read ({error}). Fetch the folder again.") from error
        self.close()
        return found

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor, as it is stored, in the mapped file."""
        if self._num_bytes >= MAPPED_BYTES:
            self.close()
        part = self._slice(name)[box]
        self._num_bytes += part.nbytes
        return part

    def close(self) -> None:
        """Unmap the files. What is read later opens them again."""
        self._opened.clear()
        self._stack.close()
        self._num_bytes = 0

    def _slice(self, name: str) -> Any:  # Any: as above
        file = self.files[name]
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._opened[file].get_slice(name)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file."""

    files: TensorFiles
    name: str
    dtype: torch.dtype
    """In which it is given."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.files.shapes[self.name]

    def read(self, box: Box) -> Tensor:
        part = self.files.read(self.name, box)
        return part.to(self.dtype) if part.is_floating_point() else part


def safetensors_files(folder: Path, stem: str) -> dict[str, Path] | None:
    """The file of each tensor of a model that is saved as `stem`, in one file or in several with an index; None for a
    folder without.

    Raises CheckpointError for an index or a head that cannot be read, and for files of the index that are missing.
    """
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file():
        try:
            files = {
                str(name): folder / file for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read ({error!r}). Fetch the folder again.") from error
        missing = sorted({file.name for file in files.values() if not file.is_file()})
        if missing:
            raise CheckpointError(f"{folder} lacks {missing[:4]} ({len(missing)} files). Fetch the folder again.")
        return files
    if not single.is_file():
        return None
    try:
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{single} cannot be read ({error}). Fetch the folder again.") from error


def file_tensors(model: nn.Module, files: TensorFiles) -> dict[str, Source]:
    """What the files have of the state of the model, by its names and in its dtypes."""
    state = model.state_dict()
    return {name: FileTensor(files, name, state[name].dtype) for name in state if name in files.files}


def check_state(
    model: nn.Module,
    found: Mapping[str, Source],
    folder: Path,
    *,
    unread: Collection[str],
    optional: Collection[str] = (),
) -> None:
    """Check that the whole state of a model is `found`, but what is `optional`, and of its shapes.

    unread: names of the files that the model has no use for, which are said in the log or the error. Raises
    CheckpointError with the names.
    """
    state = model.state_dict()
    missing = sorted(state.keys() - found.keys() - set(optional))
    mismatched = [
        f"{name}: {list(source.shape)} in the file, {list(state[name].shape)} in the model"
        for name, source in sorted(found.items())
        if source.shape != tuple(state[name].shape)
    ]
    if missing or mismatched:
        wrong = {"missing_keys": missing, "mismatched_keys": mismatched, "unexpected_keys": sorted(unread)}
        shown = ", ".join(f"{kind} {_shortened(names)}" for kind, names in wrong.items() if names)
        raise CheckpointError(f"{folder} does not hold all weights of {type(model).__name__}: {shown}. Fetch it again.")
    if unread:
        class_name, names = type(model).__name__, _shortened(sorted(unread))
        logger.warning("%s holds %d tensors that %s has not: %s", folder, len(unread), class_name, names)


def _shortened(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return f"{names[:_MOST_NAMES]}" + (f" and {more} more" if more > 0 else "")
