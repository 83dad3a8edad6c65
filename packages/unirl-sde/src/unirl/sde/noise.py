"""Seeded noise that does not depend on who draws it: one counter-based seed per key, CPU, float32.

A key names what the noise is for (a sample, a sample and a step); the seed is a hash of the key and a base seed, and
each key has its own generator. So a sample gets the same noise alone or in any batch, on any rank and in any order, and
a driver ships keys and a shape instead of tensors. Bits are those of one torch build on one kind of CPU.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor


def noise_seed(base_seed: int, key: str) -> int:
    """The seed of `key`: blake2b of "base_seed::key", 8 bytes, big endian, modulo 2^63."""
    digest = hashlib.blake2b(f"{base_seed}::{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**63


def keyed_normal(keys: Sequence[str], base_seed: int, shape: Sequence[int]) -> Tensor:
    """Standard normal noise, [len(keys), *shape] float32 on the CPU; equal keys get equal noise."""
    return _keyed(keys, base_seed, shape, torch.randn)


def keyed_uniform(keys: Sequence[str], base_seed: int, shape: Sequence[int]) -> Tensor:
    """Uniform numbers in [0, 1), [len(keys), *shape] float32 on the CPU; equal keys get equal numbers."""
    return _keyed(keys, base_seed, shape, torch.rand)


def keyed_permutation(key: str, base_seed: int, n: int) -> Tensor:
    """A random permutation of 0 .. n - 1, int64 on the CPU."""
    return torch.randperm(n, generator=_generator(base_seed, key), device="cpu")


def initial_noise(keys: Sequence[str], base_seed: int, shape: Sequence[int]) -> Tensor:
    """The latents at sigma = 1, [B, *shape] float32 on the CPU, one key per sample.

    Samples that must start from the same noise share a key; put the rollout into the key if noise shall change with it.
    """
    return keyed_normal(keys, base_seed, shape)


def step_noise(keys: Sequence[str], step: int, base_seed: int, shape: Sequence[int]) -> Tensor:
    """The noise injected at `step`, [B, *shape] float32 on the CPU: the key is "key::step::step"."""
    return keyed_normal([f"{key}::step::{step}" for key in keys], base_seed, shape)


def _generator(base_seed: int, key: str) -> Generator:
    return Generator(device="cpu").manual_seed(noise_seed(base_seed, key))


def _keyed(keys: Sequence[str], base_seed: int, shape: Sequence[int], draw: Callable[..., Tensor]) -> Tensor:
    if isinstance(keys, str):
        raise ValueError(f"keys = {keys!r} is one string; pass a sequence of keys, one per sample.")
    if not keys:
        return torch.empty((0, *shape), dtype=torch.float32, device="cpu")
    by_key = {
        key: draw(tuple(shape), generator=_generator(base_seed, key), dtype=torch.float32, device="cpu")
        for key in dict.fromkeys(keys)
    }
    return torch.stack([by_key[key] for key in keys])
