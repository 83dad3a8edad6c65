"""Checksums of tensors that a device computes where they lie: sums of their words times fixed keys, modulo 2^64.

Bytes are read as little-endian words of 32 bits, with zeros after the last, and cut into rows of `ROW_WORDS`:

    row[r] = sum over j of word[r, j] * key[j]                                  j < ROW_WORDS
    sum    = sum over r of low(row[r]) * key'[2 r] + high(row[r]) * key'[2 r + 1]

twice, with other keys. These are multiplications and additions of int64, which wrap: no device, order or chunk size
changes a bit. Lengths are not part of a sum.

If keys were drawn at random, two contents of one length would have the same row with probability 2^-33 at most: where
two words differ by d, no multiple of 2^32, at most 2^31 of the 2^64 keys give d * key one value. With the joining of
rows that is 2^-32, and 2^-64 for both sums. Keys are fixed here, outputs of SplitMix64, so faults that do not depend on
them are found with this probability; it is no proof against a forger.
Sources: Lemire and Kaser, Strongly universal string hashing is fast (arXiv 1202.4961), MULTILINEAR; Steele, Lea and
Flood, Fast splittable pseudorandom number generators (doi 10.1145/2660193.2660195).

Legend: L the two sums, R rows, N tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from unirl.types.devices import is_accelerator

ROW_WORDS = 1024
_WORD_BYTES = 4
_ROW_BYTES = ROW_WORDS * _WORD_BYTES
_NUM_SUMS = 2
_CHUNK_ROWS = 8192
"""Rows that a device multiplies at once: 32 MB of words, 64 MB of products."""
_CHUNK_ROWS_OF_HOST = 256
"""As many as stay in the cache of a CPU."""
_LOW = 0xFFFFFFFF


def word_sums(tensors: Iterable[Tensor]) -> list[str]:
    """The two sums of each tensor's bytes (row-major), as 32 hexadecimal digits; the same on every device.

    tensors: of any dtype and shape; taken one by one, and let go once they are summed, on the device of the first.
    That takes 128 MB of temporary memory at most, 128 bytes for every 4096 of theirs, and a copy of a tensor that is
    not contiguous, or not made of whole words; and one copy to the host.
    """
    summing = _Summing()
    for tensor in tensors:
        summing.add(tensor)
    return summing.result()


class _Summing:
    """Collects rows of tensors into chunks, and sums of rows until the end."""

    def __init__(self) -> None:
        self._num_bytes: list[int] = []
        self._chunk: list[Tensor] = []
        """Words of the rows that are not summed yet."""
        self._num_waiting = 0
        """Rows in `_chunk`."""
        self._rows: list[Tensor] = []
        self._device = torch.device("cpu")
        self._padding = torch.empty(0)

    def add(self, tensor: Tensor) -> None:
        """Take a tensor's bytes."""
        if not self._num_bytes:
            self._device = tensor.device
            self._padding = torch.zeros(ROW_WORDS, dtype=torch.int32, device=self._device)
        self._num_bytes.append(tensor.numel() * tensor.element_size())
        most = _CHUNK_ROWS if is_accelerator(self._device) else _CHUNK_ROWS_OF_HOST
        words = _words(tensor.to(self._device))
        while len(words):
            own, words = words.tensor_split([(most - self._num_waiting) * ROW_WORDS])
            self._chunk.append(own)
            if missing := -len(own) % ROW_WORDS:
                self._chunk.append(self._padding[:missing])
            self._num_waiting += -(-len(own) // ROW_WORDS)
            if self._num_waiting == most:
                self._sum_chunk()

    def _sum_chunk(self) -> None:
        chunk = self._chunk[0] if len(self._chunk) == 1 else torch.cat(self._chunk)
        words = chunk.view(-1, ROW_WORDS)
        self._chunk, self._num_waiting = [], 0
        # One after the other: a product takes twice the memory of its words.
        self._rows.append(torch.stack([(words * key).sum(1) for key in _row_keys(self._device)]))

    def result(self) -> list[str]:
        """The sums of each tensor."""
        if self._num_waiting:
            self._sum_chunk()
        if not self._rows:
            return ["0" * 32 for _ in self._num_bytes]
        rows_LR = torch.cat(self._rows, dim=1)
        sizes = [-(-size // _ROW_BYTES) for size in self._num_bytes]
        sizes_N = torch.tensor(sizes).to(self._device)
        owners_R = torch.arange(len(sizes), device=self._device).repeat_interleave(
            sizes_N, output_size=rows_LR.shape[1]
        )
        places_R = torch.arange(rows_LR.shape[1], device=self._device) - (sizes_N.cumsum(0) - sizes_N)[owners_R]
        found_LN = torch.zeros(_NUM_SUMS, len(sizes), dtype=torch.int64, device=self._device)
        found_LN.index_add_(1, owners_R, _joined(rows_LR, places_R))
        return ["".join(f"{each % 2**64:016x}" for each in sums) for sums in zip(*found_LN.tolist(), strict=True)]


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as int32, in one row; a copy where they are not aligned or no multiple of 4."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if len(data) % _WORD_BYTES or data.storage_offset() % _WORD_BYTES or data.data_ptr() % _WORD_BYTES:
        padded = data.new_zeros(-(-len(data) // _WORD_BYTES) * _WORD_BYTES)
        padded[: len(data)] = data
        data = padded
    return data.view(torch.int32)


def _joined(rows_LR: Tensor, places_R: Tensor) -> Tensor:
    """What each row adds to the sums of its tensor. places_R: number of the row in it."""
    sums_L1 = torch.arange(_NUM_SUMS, device=rows_LR.device)[:, None]
    # Keys after those of a row's words; four per row.
    numbers_LR = _NUM_SUMS * ROW_WORDS + 4 * places_R + 2 * sums_L1
    return (rows_LR & _LOW) * keys(numbers_LR) + (rows_LR >> 32) * keys(numbers_LR + 1)


@cache
def _row_keys(device: torch.device) -> Tensor:
    """Keys of the words of a row, int64 [L, ROW_WORDS]."""
    return keys(torch.arange(_NUM_SUMS * ROW_WORDS)).view(_NUM_SUMS, ROW_WORDS).to(device)


def keys(numbers: Tensor) -> Tensor:
    """Outputs `numbers` (int64, from 0) of the SplitMix64 generator with seed 0, as int64."""
    z = (numbers + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, num_bits: int) -> Tensor:
    """The unsigned shift to the right, where torch's repeats the sign."""
    return (z >> num_bits) & (2 ** (64 - num_bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
