"""Named copies of the weights of a rollout: by track or policy, or in one word, "painter/old,writer/ema"."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.types.errors import ConfigError

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


def copies_word(copies: Mapping[str, str | None]) -> str | None:
    """The word for the copy of each policy, None for one that is sampled as it trains."""
    return ",".join(f"{policy}/{copy}" for policy, copy in copies.items() if copy is not None) or None


def copies_of(word: str | None) -> dict[str, str]:
    """Policy -> copy. Raises ConfigError where a part of the word is no <policy>/<copy>."""
    found: dict[str, str] = {}
    for part in () if word is None else word.split(","):
        policy, separator, copy = part.partition("/")
        if not (policy and separator and copy) or policy in found:
            raise ConfigError(
                f"{word!r} names no copies of several policies. Write <policy>/<copy>, each policy once, such as "
                "writer/ema, with commas between them."
            )
        found[policy] = copy
    return found
