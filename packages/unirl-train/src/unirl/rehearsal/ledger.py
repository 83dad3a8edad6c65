"""Bytes alive on the pretend device, by phase and category, and what made them up at the peak."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unirl.types.devices import is_on_host

HOST = "host"
"""Category of what rests in host memory; it does not count towards the device."""


@dataclass
class Peak:
    """The most bytes of a phase."""

    num_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """Bytes by category at that moment."""


@dataclass(eq=False)
class Watch:
    """The most bytes that came to the device while something ran."""

    before: int
    peak: int = 0


@dataclass
class _Entry:
    """One storage."""

    num_bytes: int
    category: str
    at_home: str
    """Category on the device."""


class Ledger:
    """Every storage of the pretend device, from birth to death."""

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        """Bytes alive now, by category."""
        self.peaks: dict[str, Peak] = {}
        """By phase."""
        self.host_peak = 0
        """Most bytes that rested in host memory at once."""
        self.category = "weights"
        """Category of what is made now."""
        self._device_bytes = 0
        self._entries: dict[int, _Entry] = {}
        self._phase = ""
        self._is_silent = 0
        self._watches: list[Watch] = []
        self.enter_phase("start")

    @property
    def device_bytes(self) -> int:
        """Bytes alive on the device now."""
        return self._device_bytes

    def enter_phase(self, name: str) -> None:
        """Count peaks as this phase's from now on."""
        self._phase = name
        self.peaks.setdefault(name, Peak())
        self._note()

    @contextmanager
    def watched(self) -> Generator[Watch]:
        """Within it, the most bytes above those at its beginning are noted."""
        watch = Watch(self._device_bytes)
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches.remove(watch)

    def bump(self, num_bytes: int) -> None:
        """Count so many bytes of activations that came and went."""
        entry = _Entry(0, self.category, self.category)
        self._grow(entry, num_bytes)
        self._grow(entry, -num_bytes)

    @contextmanager
    def silent(self) -> Generator[None]:
        """Within it nothing is counted: what is made only answers a question about shapes."""
        self._is_silent += 1
        try:
            yield
        finally:
            self._is_silent -= 1

    def made(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors that are new."""
        if self._is_silent:
            return
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._entries:
                category = HOST if is_on_host() else self.category
                self._entries[key] = _Entry(0, category, self.category)
                self._grow(self._entries[key], storage.nbytes())
                weakref.finalize(storage, self._died, key).atexit = False

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """A storage was given another size: FSDP frees and fills gathered blocks so."""
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            self._grow(entry, num_bytes - entry.num_bytes)

    def label(self, tensors: Iterable[Tensor], category: str) -> None:
        """Give storages on the device another category."""
        for entry in self._entries_of(tensors):
            entry.at_home = category
            if entry.category != HOST:
                self._put(entry, category)

    def leave(self, tensor: Tensor) -> None:
        """A storage is in host memory from now on."""
        for entry in self._entries_of([tensor]):
            self._put(entry, HOST)

    def come_back(self, tensor: Tensor) -> None:
        """A storage that left is on the device again."""
        for entry in self._entries_of([tensor]):
            self._put(entry, entry.at_home)

    def _entries_of(self, tensors: Iterable[Tensor]) -> Iterator[_Entry]:
        for tensor in tensors:
            entry = self._entries.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                yield entry

    def _put(self, entry: _Entry, category: str) -> None:
        if entry.category != category:
            num_bytes = entry.num_bytes
            self._grow(entry, -num_bytes)
            entry.category = category
            self._grow(entry, num_bytes)

    def _grow(self, entry: _Entry, num_bytes: int) -> None:
        entry.num_bytes += num_bytes
        self.alive[entry.category] += num_bytes
        if entry.category == HOST:
            self.host_peak = max(self.host_peak, self.alive[HOST])
        else:
            self._device_bytes += num_bytes
        if num_bytes > 0:
            self._note()

    def _note(self) -> None:
        for watch in self._watches:
            watch.peak = max(watch.peak, self._device_bytes - watch.before)
        peak = self.peaks[self._phase]
        if self._device_bytes > peak.num_bytes:
            peak.num_bytes = self._device_bytes
            peak.parts = {name: size for name, size in self.alive.items() if name != HOST and size > 0}

    def _died(self, key: int) -> None:
        entry = self._entries.pop(key)
        self._grow(entry, -entry.num_bytes)
