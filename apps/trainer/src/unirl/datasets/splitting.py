"""Choices by hash: the same on every machine, and independent of the order of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def fraction_of(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def is_held_out(text: str, fraction: float) -> bool:
    """True if a prompt belongs to the held-out `fraction` of all prompts."""
    return fraction_of(text) < fraction


def drawn(options: Sequence[T], key: str) -> T:
    """One of the options, by the hash of `key`."""
    return options[_place(key, len(options))]


def several_drawn(options: Iterable[T], num: int, key: str) -> list[T]:
    """`num` different ones of the options, by the hash of `key`."""
    left = list(options)
    return [left.pop(_place(f"{key} {number}", len(left))) for number in range(num)]


def _place(key: str, length: int) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % length


def first_by_hash(items: Iterable[T], num: int, text: Callable[[T], str]) -> list[T]:
    """At most `num` of the items, in the order of the hashes of their texts."""
    return sorted(items, key=lambda item: hashlib.sha256(text(item).encode()).digest())[:num]


def distinct(items: Iterable[T], text: Callable[[T], str]) -> Iterator[T]:
    """The first item of every text; white space at its ends and in a row counts as one space."""
    seen: set[str] = set()
    for item in items:
        key = " ".join(text(item).split())
        if key not in seen:
            seen.add(key)
            yield item
