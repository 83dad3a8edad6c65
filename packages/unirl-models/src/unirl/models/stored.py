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
from safetensors.torch import load_file
from torch import Tensor, nn

from unirl.types.errors import CheckpointError
from unirl.types.protocols.models import StoredTensor

logger = logging.getLogger(__name__)

MAPPED_BYTES = 2**26
"""Bytes that are read of mapped files before these are closed: pages that were read count as memory until then."""
_MOST_NAMES = 8
_MOST_SIZES = 3

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
    missing, mismatched = sorted(model.state_dict().keys() - found.keys() - set(optional)), _mismatched(model, found)
    if missing:
        wrong = {"missing_keys": missing, "mismatched_keys": mismatched, "unexpected_keys": sorted(unread)}
        shown = ", ".join(f"{kind} {_shortened(names)}" for kind, names in wrong.items() if names)
        raise CheckpointError(
            f"{folder} does not hold all weights of {type(model).__name__}: {shown}. Fetch it again, or give the "
            "weights that were saved from this model."
        )
    if problem := size_problem(model, found, folder):
        raise CheckpointError(problem)
    if unread:
        class_name, names = type(model).__name__, _shortened(sorted(unread))
        logger.warning("%s holds %d tensors that %s has not: %s", folder, len(unread), class_name, names)


def size_problem(model: nn.Module, found: Mapping[str, Source], folder: Path) -> str | None:
    """The message for tensors whose shape is not the model's: file, tensors, both shapes, what to change; None where
    all fit."""
    wrong = _mismatched(model, found)
    if not wrong:
        return None
    sources = [found[line.partition(":")[0]] for line in wrong]
    files = {each.files.files[each.name] if isinstance(each, FileTensor) else folder for each in sources}
    return (
        f"{', '.join(map(str, sorted(files)))} does not fit {type(model).__name__}: {'; '.join(wrong[:_MOST_SIZES])}"
        f"{f' and {len(wrong) - _MOST_SIZES} more' if len(wrong) > _MOST_SIZES else ''}. Give the weights that were "
        "saved from this model (fetch them again if these should be), or build it with the sizes of the file: its "
        "config.json, or the bundle that the recipe names."
    )


def _mismatched(model: nn.Module, found: Mapping[str, Source]) -> list[str]:
    state = model.state_dict()
    return [
        f"{name}: {list(source.shape)} in the file, {list(state[name].shape)} in the model"
        for name, source in sorted(found.items())
        if source.shape != tuple(state[name].shape)
    ]


def load_weights(module: nn.Module, file: Path) -> None:
    """Give a module its whole state from one safetensors file, whose names and shapes are compared before its values
    are read.

    Raises CheckpointError naming the file and its tensors if it cannot be read or does not fit.
    """
    names = safetensors_files(file.parent, file.stem) if file.suffix == ".safetensors" else None
    if names is None:
        raise CheckpointError(f"{file} is no safetensors file. Give the folder that holds the weights of this model.")
    files = TensorFiles(names)
    found = file_tensors(module, files)
    if unread := sorted(names.keys() - found.keys()):
        raise CheckpointError(
            f"{file} holds {len(unread)} tensors that {type(module).__name__} has not: {_shortened(unread)}. Give the "
            "weights that were saved from this model."
        )
    check_state(module, found, file, unread=())
    module.load_state_dict(load_file(file))


def _shortened(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return f"{names[:_MOST_NAMES]}" + (f" and {more} more" if more > 0 else "")
