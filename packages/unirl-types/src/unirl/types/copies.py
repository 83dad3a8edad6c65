"""Which named copies of the weights several policies are sampled from, in one word: "painter/old,writer/ema".

A policy that is not named is sampled from as it trains. Where there is one policy, the word is the copy alone; or,
where its tracks are sampled from different copies, the tracks stand in the place of policies: "image/old".
"""

from __future__ import annotations

from collections.abc import Mapping

from unirl.types.errors import ConfigError


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
