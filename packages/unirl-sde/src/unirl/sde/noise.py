"""Seeded noise that does not depend on who draws it: one 64-bit hash per key, CPU, float32.

A key names what the noise is for (a sample, a sample and a step); the seed is a hash of the key and a base seed, and
each key has its own generators. So a sample gets the same noise alone or in any batch, on any rank and in any order,
and a driver ships keys and a shape instead of tensors. Bits are those of one torch build on one kind of CPU.

torch's CPU generator keeps only the lower 32 bits of a seed, so that among 55,730 keys two are likely to draw the same
noise. Each key therefore draws two streams of uniform numbers, one per half of its hash, and takes their difference
modulo 1: uniform again, and independent between keys unless both halves agree. Where a key's two halves are equal, its
second stream has another seed: the difference of a stream with itself is 0.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

_FLOAT32_STEP = 2.0**-24
"""Distance between the numbers that `torch.rand` draws in float32."""


def noise_seed(base_seed: int, key: str) -> int:
    """The seed of `key` for a generator elsewhere (an engine's): its 64-bit hash modulo 2^63."""
    return _hash(base_seed, key) % 2**63


def keyed_normal(keys: Sequence[str], base_seed: int, shape: Sequence[int]) -> Tensor:
    """Standard normal noise, [len(keys), *shape] float32 on the CPU; equal keys get equal noise.

    The normal quantile of uniform numbers at the middle of their 2^-24 steps: |noise| is at most 5.42.
    """
    uniform = keyed_uniform(keys, base_seed, shape)
    return uniform.mul_(2).add_(_FLOAT32_STEP - 1).erfinv_().mul_(math.sqrt(2))


def keyed_uniform(keys: Sequence[str], base_seed: int, shape: Sequence[int]) -> Tensor:
    """Uniform numbers in [0, 1), [len(keys), *shape] float32 on the CPU; equal keys get equal numbers."""
    if isinstance(keys, str):
        raise ValueError(f"keys = {keys!r} is one string; pass a sequence of keys, one per sample.")
    if not keys:
        return torch.empty((0, *shape), dtype=torch.float32, device="cpu")
    distinct = list(dict.fromkeys(keys))
    drawn = _uniform([_hash(base_seed, key) for key in distinct], shape, torch.float32)
    if len(distinct) == len(keys):
        return drawn
    row_of = {key: row for row, key in enumerate(distinct)}
    return drawn[[row_of[key] for key in keys]]


def keyed_permutation(key: str, base_seed: int, n: int) -> Tensor:
    """A random permutation of 0 .. n - 1, int64 on the CPU."""
    return _uniform([_hash(base_seed, key)], (n,), torch.float64)[0].argsort(stable=True)


def initial_noise(keys: Sequence[str], base_seed: int, shape: Sequence[int]) -> Tensor:
    """The latents at sigma = 1, [B, *shape] float32 on the CPU, one key per sample.

    Samples that must start from the same noise share a key; put the rollout into the key if noise shall change with it.
    """
    return keyed_normal(keys, base_seed, shape)


def step_noise(keys: Sequence[str], step: int, base_seed: int, shape: Sequence[int]) -> Tensor:
    """The noise injected at `step`, [B, *shape] float32 on the CPU: the key is "key::step::step"."""
    return keyed_normal([f"{key}::step::{step}" for key in keys], base_seed, shape)


def _hash(base_seed: int, key: str) -> int:
    """blake2b of "base_seed::key", 8 bytes, big endian."""
    digest = hashlib.blake2b(f"{base_seed}::{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _uniform(hashes: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1), [len(hashes), *shape] on the CPU, each row from all 64 bits of its hash."""
    generator = Generator(device="cpu")
    upper, lower = torch.empty(2, len(hashes), *shape, dtype=dtype, device="cpu")
    for row, hashed in enumerate(hashes):
        seeds = hashed >> 32, hashed & 0xFFFFFFFF
        if seeds[0] == seeds[1]:
            seeds = seeds[0], seeds[1] ^ 1
        for seed, stream in zip(seeds, (upper, lower), strict=True):
            torch.rand(tuple(shape), generator=generator.manual_seed(seed), out=stream[row], device="cpu")
    difference = upper.sub_(lower)  # exact: both are multiples of one step
    return difference.add_(difference < 0)
