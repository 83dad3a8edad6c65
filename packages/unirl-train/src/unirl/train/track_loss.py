"""What the loss of each of several tracks weighs, and when it has a part. Needs no torch: `trainer check` asks it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from unirl.types.bounds import NonNegativeInt, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError


@bounded("stack.losses")
@dataclass(frozen=True)
class TrackLoss:
    """What the loss of one of several tracks weighs, and in which updates it has a part.

    every, turn: the track trains in the updates n = turn, turn + every, ... of the run, n counted from 0 over all
        rollouts: U = 2 updates per rollout with every = 2 train it in one update of each rollout, U = 1 in every second
        rollout. Its samples of a rollout are divided over its own updates there.
    micro_batch_size: samples of the track that a backward holds at once; None takes the stack's.
    """

    weight: Positive = 1.0
    every: PositiveInt = 1
    turn: NonNegativeInt = 0
    micro_batch_size: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.turn >= self.every:
            raise ConfigError(f"stack.losses: turn = {self.turn} must be below every = {self.every}")

    def updates(self, start: int, count: int) -> list[int]:
        """Which of the updates `start` .. `start + count - 1` of the run train the track, counted from `start`."""
        return [update for update in range(count) if (start + update) % self.every == self.turn]


def track_losses(
    tracks: Iterable[str],
    given: Mapping[str, TrackLoss | Mapping[str, Any]],  # Any: keywords of TrackLoss
) -> dict[str, TrackLoss]:
    """The loss of every track: what is given, as an object or as keywords, else weight 1 in every update.

    Raises ConfigError for losses of tracks that do not train, for unknown keywords, and where an update trains nothing.
    """
    names = list(tracks)
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ConfigError(f"stack.losses names tracks {unknown}, which no algorithm trains; there are {names}")
    losses = {name: _track_loss(name, given.get(name, {})) for name in names}
    period = math.lcm(*(loss.every for loss in losses.values()))
    idle = [n for n in range(period) if not any(loss.updates(n, 1) for loss in losses.values())]
    if idle:
        turns = {name: (loss.every, loss.turn) for name, loss in losses.items()}
        raise ConfigError(
            f"update {idle[0]} of every {period} would train no track: stack.losses has (every, turn) = {turns}. "
            "Let every update train a track."
        )
    return losses


def _track_loss(track: str, given: TrackLoss | Mapping[str, Any]) -> TrackLoss:  # Any: as above
    if isinstance(given, TrackLoss):
        return given
    known = [item.name for item in dataclasses.fields(TrackLoss)]
    wrong = sorted(set(given) - set(known))
    if wrong:
        raise ConfigError(f"stack.losses.{track} has no {', '.join(wrong)}; there are {', '.join(known)}")
    return TrackLoss(**given)
