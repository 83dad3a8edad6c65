"""A bucket of weights as a safetensors file: one process writes it, others read it in place or give it to an engine.

The files of a push are written again by the next one, through mappings that both sides keep: memory that is new takes
several times as long as the copy into it.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from unirl.types.deltas import put_delta
from unirl.types.devices import copy_together
from unirl.types.errors import WeightSyncError, as_sentence

MEMORY = "/dev/shm"
"""Folder of files that are in memory, which the processes of one machine share."""
_ALIGNMENT = 64
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def is_memory(folder: Path | str) -> bool:
    """True if a folder is in the memory of this machine."""
    return Path(folder).resolve().is_relative_to(MEMORY)


@dataclass(frozen=True)
class BucketLayout:
    """Where the tensors of a bucket lie in a safetensors file."""

    header: bytes
    spans: tuple[tuple[str, torch.dtype, tuple[int, ...], int, int], ...]
    """Name, dtype, shape, start and stop of each tensor, in bytes of the file."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The places of these tensors. The format allows no gaps, so those of larger elements come first."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            stop = place + tensor.numel() * tensor.element_size()
            entries[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [place, stop],
            }
            place = stop
        text = json.dumps(entries).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return cls.parse(len(text).to_bytes(8, "little") + text)

    @classmethod
    def parse(cls, header: bytes) -> Self:
        """The layout that the first bytes of a file say, those of the tensors not needed."""
        begin = 8 + int.from_bytes(header[:8], "little")
        entries = json.loads(header[8:begin])
        entries.pop("__metadata__", None)
        return cls(
            header[:begin],
            tuple(
                (name, _DTYPES[said["dtype"]], tuple(said["shape"]), *(begin + end for end in said["data_offsets"]))
                for name, said in entries.items()
            ),
        )

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return max((stop for *_, stop in self.spans), default=len(self.header))

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in the bytes of a file, uint8, whose memory they share."""
        return {name: buffer[start:stop].view(dtype).view(shape) for name, dtype, shape, start, stop in self.spans}

    def span(self, name: str, first: int, last: int) -> tuple[int, int]:
        """Start and stop of rows [first, last) of a tensor, in bytes of the file."""
        _, _, shape, start, stop = self._places[name]
        row = (stop - start) // max(1, shape[0] if shape else 1)
        return start + first * row, start + last * row

    def place(self, buffer: Tensor, name: str, first: int, shape: Sequence[int]) -> Tensor:
        """Where rows of a tensor from `first` on lie in the bytes of a file; shape: of these rows."""
        dtype = self._places[name][1]
        start, stop = self.span(name, first, first + (shape[0] if shape else 1))
        return buffer[start:stop].view(dtype).view(tuple(shape))

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """One tensor in the bytes of a file, as in `views`."""
        _, dtype, shape, start, stop = self._places[name]
        return buffer[start:stop].view(dtype).view(shape)

    def extent(self, name: str) -> tuple[int, int, torch.dtype]:
        """Start and stop of a tensor, in bytes of the file, and its dtype."""
        _, dtype, _, start, stop = self._places[name]
        return start, stop, dtype

    @cached_property
    def _places(self) -> dict[str, tuple[str, torch.dtype, tuple[int, ...], int, int]]:
        return {span[0]: span for span in self.spans}

    def write(self, tensors: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Copy the header and the tensors into a buffer, uint8 [at least num_bytes]."""
        buffer[: len(self.header)].copy_(torch.frombuffer(bytearray(self.header), dtype=torch.uint8))
        places = self.views(buffer)
        copy_together(list(places.values()), [tensors[name] for name in places])


class BucketFiles:
    """The numbered files of one writer in a folder: in memory written through mappings, else as files are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_mapped = is_memory(folder)
        self._buffers: dict[int, Tensor] = {}

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> Path:
        """Write tensors over what file `number` held. Raises WeightSyncError if there is no room."""
        layout = BucketLayout.of(tensors)
        path = self.begin(number, layout)
        for name, tensor in tensors.items():
            self.write_rows(number, layout, name, tensor)
        return path

    def begin(self, number: int, layout: BucketLayout) -> Path:
        """Give file `number` this layout, of which others may write parts. Raises as `write`."""
        path = self.path(number)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, layout.num_bytes)
                os.pwrite(descriptor, layout.header, 0)
                if self._is_mapped:
                    self._map(number, descriptor, layout.num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _no_room(path, layout, error) from error
        return path

    def write_rows(self, number: int, layout: BucketLayout, name: str, rows: Tensor, start: int = 0) -> None:
        """Write rows of a tensor, from row `start` on, into a file that has begun. Raises as `write`."""
        if self._is_mapped:
            layout.place(self._buffers[number], name, start, rows.shape).copy_(rows)
            return
        path, own = self.path(number), rows.detach().cpu().contiguous()
        try:
            with path.open("r+b") as file:
                file.seek(layout.span(name, start, start)[0])
                file.write(own.flatten().view(torch.uint8).numpy())
        except OSError as error:
            raise _no_room(path, layout, error) from error

    def put_delta(self, number: int, layout: BucketLayout, name: str, delta: Tensor) -> None:
        """Put changed elements (`unirl.types.deltas`) into a tensor of a complete file.

        Raises WeightSyncError if they are of another tensor.
        """
        try:
            if self._is_mapped:
                put_delta(layout.view(self._buffers[number], name), delta)
                return
            with self.path(number).open("r+b") as file:
                start, stop, dtype = layout.extent(name)
                file.seek(start)
                data = bytearray(file.read(stop - start))
                put_delta(torch.frombuffer(data, dtype=dtype), delta)
                file.seek(start)
                file.write(data)
        except WeightSyncError as error:
            raise WeightSyncError(f"{name} arrived changed: {error}") from error

    def path(self, number: int) -> Path:
        """Where file `number` lies."""
        return self._folder / f"bucket-{number}.safetensors"

    def _map(self, number: int, descriptor: int, num_bytes: int) -> None:
        """Map a file of exactly this size; its memory is reserved, since a write could not fail."""
        present = self._buffers.get(number)
        if present is None or present.numel() != num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
            self._buffers[number] = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _no_room(path: Path, layout: BucketLayout, error: OSError) -> WeightSyncError:
    return WeightSyncError(
        f"a bucket of {layout.num_bytes / 1e6:.1f} MB cannot be written to {path}: {as_sentence(error)} Free space "
        "there, or set another transfer_dir (of sync or engine) or a smaller sync.bucket_bytes."
    )


class MappedBuckets:
    """Reads the files of `BucketFiles` in place; those in memory stay mapped for the next push."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[int, int, int], Tensor]] = {}

    def tensors(self, path: str) -> dict[str, Tensor]:
        """The tensors of a file. They share its memory, must not be written to, and last until the next push begins.

        Raises WeightSyncError if the file cannot be read.
        """
        try:
            with Path(path).open("rb") as file:
                found = os.fstat(file.fileno())
                key = (found.st_dev, found.st_ino, found.st_size)
                last, buffer = self._kept.get(path, (None, None))
                if last != key or buffer is None or not is_memory(path):
                    buffer = _mapped(file.fileno())
                    self._kept[path] = key, buffer
            length = 8 + int.from_bytes(bytes(buffer[:8].numpy()), "little")
            layout = BucketLayout.parse(bytes(buffer[:length].numpy()))
            if layout.num_bytes != buffer.numel():
                raise ValueError(f"it holds {buffer.numel()} bytes, expected {layout.num_bytes}")
            return layout.views(buffer)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise WeightSyncError(f"weights cannot be read from {path}: {as_sentence(error)}") from error

    def forget_removed(self) -> None:
        """Give back the memory of files that are gone."""
        self._kept = {path: kept for path, kept in self._kept.items() if Path(path).exists()}


def _mapped(descriptor: int) -> Tensor:
    """The bytes of a file, uint8; torch warns that they cannot be written to, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), dtype=torch.uint8)
