"""Which named copies of the weights a rollout is sampled from."""

from __future__ import annotations

from collections.abc import Mapping

Copies = str | Mapping[str, str] | None
"""A copy such as "old" or "ema" for all that is sampled; or copies by track or by policy, where a track counts before
its policy and what is not named is sampled with the present weights; None: the present weights."""


def copy_of(copies: Copies, track: str, policy: str) -> str | None:
    """The copy that a track of a policy is sampled from, None for the present weights."""
    if copies is None or isinstance(copies, str):
        return copies
    return copies.get(track, copies.get(policy))


def merged_copies(copies: Mapping[str, str | None]) -> Copies:
    """The copies of several tracks as one value: the one that all share, or those by track."""
    distinct = set(copies.values())
    if len(distinct) <= 1:
        return next(iter(distinct), None)
    return {track: copy for track, copy in copies.items() if copy is not None}
