"""A bounded memory of past groups, and which of them to train on again: ids and numbers, no tensors.

For objectives that take samples of older policies (DiffusionNFT, AWM, RWR, RAFT, CRD; OP-GRPO with its correction).
"Replay" means experience replay here, not the forward that scores stored samples again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from unirl.types.bounds import NonNegativeInt, PositiveInt, Seed, bounded
from unirl.types.errors import ContractError

DrawOrder = Literal["uniform", "recent", "advantage"]


@dataclass(frozen=True)
class ReplayEntry:
    """One group that may be trained on again."""

    key: str
    """What the samples are found by."""
    version: int
    """The oldest policy that made any of them."""
    advantage: float
    """How much there is to learn: the mean absolute advantage, say. Its sign is not looked at."""


@bounded("replay")
class ReplayBuffer:
    """Remembers the newest entries and draws some of them, without repetition within a draw.

    capacity: entries kept; beyond it the oldest version goes first, of one version the one added first.
    order: "uniform": all alike; "recent": the newest versions, of one version the one added last; "advantage": one by
        one, with probability in proportion to |advantage| among those left, so that 0 is never drawn.
    max_staleness: versions that an entry may be behind where it is drawn; None draws any.
    seed: of the draws. A draw depends on the seed, how many there were before, and the entries; not on the order in
        which these came, except for "recent".
    """

    def __init__(
        self,
        *,
        capacity: PositiveInt,
        order: DrawOrder = "uniform",
        max_staleness: NonNegativeInt | None = None,
        seed: Seed = 0,
    ) -> None:
        self.capacity = capacity
        self.order: DrawOrder = order
        self.max_staleness = max_staleness
        self.seed = seed
        self._entries: dict[str, ReplayEntry] = {}
        """In the order in which they were added."""
        self._num_draws = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[ReplayEntry]:
        """In the order in which they were added."""
        return list(self._entries.values())

    def add(self, entries: Iterable[ReplayEntry]) -> list[str]:
        """Remember entries; one whose key is known replaces it. Returns the keys that had to go, old or new.

        Raises ContractError for an advantage that is not finite.
        """
        for entry in entries:
            if not math.isfinite(entry.advantage):
                raise ContractError(f"the advantage of {entry.key!r} is {entry.advantage}: it cannot be replayed")
            self._entries.pop(entry.key, None)
            self._entries[entry.key] = entry
        surplus = len(self._entries) - self.capacity
        return (
            self.discard([entry.key for entry in sorted(self.entries, key=_version)[:surplus]]) if surplus > 0 else []
        )

    def discard(self, keys: Iterable[str]) -> list[str]:
        """Forget these keys; returns those that were known."""
        return [key for key in keys if self._entries.pop(key, None) is not None]

    def discard_older(self, version: int) -> list[str]:
        """Forget what no draw under this version of the policy, or a later one, can return; returns the keys."""
        return self.discard([entry.key for entry in self.entries if not self._is_in_reach(entry, version)])

    def draw(self, count: int, *, version: int) -> list[ReplayEntry]:
        """At most `count` different entries for training at this version of the policy; they stay in the buffer.

        Fewer where fewer are in reach of `max_staleness`, or have an advantage under order "advantage".
        Raises ContractError for a count below 0.
        """
        if count < 0:
            raise ContractError(f"{count} entries cannot be drawn")
        drawn = self._num_draws
        self._num_draws += 1
        within = [entry for entry in self.entries if self._is_in_reach(entry, version)]
        if self.order == "recent":
            return sorted(reversed(within), key=_version, reverse=True)[:count]
        if self.order == "uniform":
            weights = {entry.key: 1.0 for entry in within}
        else:
            weights = {entry.key: abs(entry.advantage) for entry in within if entry.advantage != 0}
        # The times at which independent exponential clocks with these rates first ring: the first `count` of them are
        # draws without replacement (Efraimidis and Spirakis 2006).
        times = {key: -math.log(self._uniform(drawn, key)) / weight for key, weight in weights.items()}
        return [self._entries[key] for key in sorted(times, key=lambda key: (times[key], key))[:count]]

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The entries and the number of draws, as JSON."""
        return {"num_draws": self._num_draws, "entries": [asdict(entry) for entry in self.entries]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Restore `state_dict`; with a smaller capacity than it was saved with, as if the entries were added."""
        saved: Sequence[Mapping[str, Any]] = state["entries"]
        self._entries = {}
        self._num_draws = int(state["num_draws"])
        self.add(ReplayEntry(str(each["key"]), int(each["version"]), float(each["advantage"])) for each in saved)

    def _is_in_reach(self, entry: ReplayEntry, version: int) -> bool:
        return self.max_staleness is None or version - entry.version <= self.max_staleness

    def _uniform(self, draw: int, key: str) -> float:
        """In (0, 1), by a hash of the seed, the draw and the key."""
        digest = hashlib.blake2b(f"{self.seed}::{draw}::{key}".encode(), digest_size=8).digest()
        return ((int.from_bytes(digest, "big") >> 11) + 0.5) / 2**53


def _version(entry: ReplayEntry) -> int:
    return entry.version
