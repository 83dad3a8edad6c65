"""Encoded prompts, kept by content: in memory, and on disk where a folder is given.

The key names everything an embedding depends on (encoder weights, text, length, dtype), so a folder may be shared by
runs and models and never needs clearing. Values are small dicts of CPU tensors, one prompt each.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

logger = logging.getLogger(__name__)

Embedding = dict[str, Tensor]


@dataclass
class CacheStatistics:
    """How often prompts were found. Counts since the cache was made, one per unique prompt of a batch."""

    num_memory_hits: int = 0
    num_disk_hits: int = 0
    num_misses: int = 0
    num_lost: int = 0
    """Embeddings that no longer fit into memory, where there is no folder."""

    @property
    def hit_fraction(self) -> float:
        """Share of look-ups that needed no encoder; 0 before the first."""
        total = self.num_memory_hits + self.num_disk_hits + self.num_misses
        return (total - self.num_misses) / total if total else 0.0


def content_key(*facts: str | int | None) -> str:
    """A hexadecimal name for everything that determines an embedding."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=20).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """A hexadecimal name for shape and content, in float32."""
    digest = hashlib.blake2b(str(tuple(tensor.shape)).encode(), digest_size=20)
    digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class EmbeddingCache:
    """Least recently used in memory, everything on disk.

    folder: where embeddings persist, one safetensors file each, written atomically; None keeps them in memory only.
    memory_bytes: limit of the memory part. Without a folder, what falls out must be encoded again.
    """

    def __init__(self, folder: str | Path | None = None, *, memory_bytes: int = 4 * 2**30) -> None:
        self.folder = None if folder is None else Path(folder)
        self.memory_bytes = memory_bytes
        self.statistics = CacheStatistics()
        self._memory: OrderedDict[str, Embedding] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: str) -> Embedding | None:
        """The embedding of a key, or None. An unreadable file counts as absent and is logged."""
        if key in self._memory:
            self._memory.move_to_end(key)
            self.statistics.num_memory_hits += 1
            return self._memory[key]
        embedding = self._read(key)
        if embedding is None:
            self.statistics.num_misses += 1
            return None
        self.statistics.num_disk_hits += 1
        self._remember(key, embedding)
        return embedding

    def put(self, key: str, embedding: Embedding) -> None:
        """Keep an embedding; its tensors are copied to the CPU."""
        embedding = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in embedding.items()}
        self._remember(key, embedding)
        if self.folder is None:
            return
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may write the same key: each has its own partial file and the rename is atomic.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        save_file(embedding, partial)
        os.replace(partial, path)

    def lookup(
        self,
        keys: Sequence[str],
        encode: Callable[[list[int]], Sequence[Embedding]],
        *,
        batch_size: int,
    ) -> list[Embedding]:
        """The embedding of each key, on the CPU; only the unique and unknown ones are encoded.

        encode(at most batch_size places in `keys`, of different keys) -> one embedding per place; their lengths may
        differ.
        """
        found: dict[str, Embedding] = {}
        unknown: list[int] = []
        first_places = {key: place for place, key in reversed(list(enumerate(keys)))}
        for key, place in sorted(first_places.items(), key=lambda item: item[1]):
            embedding = self.get(key)
            if embedding is None:
                unknown.append(place)
            else:
                found[key] = embedding
        for start in range(0, len(unknown), batch_size):
            part = unknown[start : start + batch_size]
            for place, encoded in zip(part, encode(part), strict=True):
                found[keys[place]] = {name: tensor.detach().to("cpu") for name, tensor in encoded.items()}
                self.put(keys[place], found[keys[place]])
        return [found[key] for key in keys]

    def _path(self, key: str) -> Path:
        if self.folder is None:
            raise ValueError("this cache has no folder")
        return self.folder / key[:2] / f"{key}.safetensors"

    def _read(self, key: str) -> Embedding | None:
        if self.folder is None or not self._path(key).is_file():
            return None
        try:
            return load_file(self._path(key))
        except (OSError, SafetensorError) as error:
            logger.warning("cached embedding %s is unreadable and will be encoded again: %s", self._path(key), error)
            return None

    def _remember(self, key: str, embedding: Embedding) -> None:
        self._forget(key)
        size = _num_bytes(embedding)
        if size > self.memory_bytes:
            self._note_lost()
            return
        self._memory[key] = embedding
        self._num_bytes += size
        while self._num_bytes > self.memory_bytes:
            self._forget(next(iter(self._memory)))
            self._note_lost()

    def _note_lost(self) -> None:
        if self.folder is None:
            self.statistics.num_lost += 1

    def _forget(self, key: str) -> None:
        old = self._memory.pop(key, None)
        if old is not None:
            self._num_bytes -= _num_bytes(old)


def _num_bytes(embedding: Embedding) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in embedding.values())
