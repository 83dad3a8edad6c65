"""The order of a run: with which version of the weights its requests began. Repeated, it gives the same run."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unirl.config.schema import Schedule
from unirl.trainer.loops.slots import Slot
from unirl.types.errors import ConfigError

REQUESTS = "requests.jsonl"
"""File of a run directory: per request a line with `request`, its number, `rollout` and `version`, and another one with
`calls` if these began with several versions, `resumed`, the versions with which calls went on that pushes had cut
short, and `trained`, the rollout that it was trained on with, if that is not its
own. The last line of a number counts."""


@dataclass(frozen=True)
class Begun:
    """The version of the weights with which a request was admitted, and with which its calls began."""

    version: int
    calls: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Pool -> version of each call, in the order of the samples. Empty: all began with `version`."""
    trained: int | None = None
    """The rollout that it was trained on with; None: its own."""

    def rollout(self, request: int, per_rollout: int) -> int:
        """The rollout that it is trained on with. request: its number."""
        return request // per_rollout if self.trained is None else self.trained


def is_due(order: Mapping[int, Begun], request: int, version: int) -> bool:
    """True if a request begins with this version, or with one from before a resume."""
    begun = order.get(request)
    return begun is not None and begun.version <= version


def requests_of(order: Mapping[int, Begun], rollout: int, per_rollout: int) -> set[int]:
    """Numbers of the requests that a rollout is trained on with."""
    return {number for number, begun in order.items() if begun.rollout(number, per_rollout) == rollout}


class OrderLog:
    """Appends what the engine begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = threading.Lock()

    def begun(self, slot: Slot[Any], trained: int | None = None) -> None:
        """Add a line. trained: the rollout that it is trained on with, if that is not its own."""
        line: dict[str, Any] = {"request": slot.number, "rollout": slot.rollout, "version": slot.version}  # Any: JSON
        line.update({"calls": slot.calls} if slot.calls else {})
        line.update({"resumed": list(slot.resumed)} if slot.resumed else {})
        line.update({} if trained is None else {"trained": trained})
        with self._writing, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def order_of(schedule: Schedule, batch_size: int, num_rollouts: int) -> Mapping[int, Begun] | None:
    """The order that a run repeats, see `read_order`; None if it repeats none."""
    if schedule.replay is None:
        return None
    per_rollout = batch_size // (schedule.groups_per_request or batch_size)
    return read_order(
        Path(schedule.replay).expanduser(),
        num_requests=num_rollouts * per_rollout,
        per_rollout=per_rollout,
        max_staleness=schedule.staleness,
    )


def read_order(path: Path, *, num_requests: int, per_rollout: int, max_staleness: int) -> Mapping[int, Begun]:
    """Request of this run -> how it begins. The file may have more.

    Raises ConfigError for a file that cannot be read, that lacks requests of the run, or whose order the run's slots do
    not allow: versions that fall, or a request that would be trained on before it begins or more than `max_staleness`
    versions after, or a call that would begin before its request, or after it is trained on.
    """
    at = f"schedule.replay = {path}"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        order = {int(line["request"]): _begun(line) for line in lines}
        cut = [int(line["request"]) for line in lines if line.get("resumed")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{at} cannot be read ({type(error).__name__}: {error}). Name the {REQUESTS} of a run directory."
        ) from error
    if cut:
        raise ConfigError(
            f"{at} is of a run whose pushes cut calls short (schedule.on_push), such as request {cut[0]}, "
            "after as many tokens as there were. No run repeats that. Name the file of a run with on_push: finish."
        )
    before, sizes = 0, Counter[int]()
    for request in range(num_requests):
        begun = order.get(request)
        if begun is None:
            raise ConfigError(
                f"{at} has no request {request} of {num_requests}. Set num_rollouts and schedule.groups_per_request as "
                "in the run that wrote it."
            )
        version, rollout = begun.version, begun.rollout(request, per_rollout)
        sizes[rollout] += 1
        calls = [each for own in begun.calls.values() for each in own]
        if (
            not max(before, rollout - max_staleness)
            <= version
            <= min(calls, default=rollout)
            <= max(calls, default=rollout)
            <= rollout
        ):
            also = f" with calls at {min(calls)} to {max(calls)}" if calls else ""
            raise ConfigError(
                f"{at} begins request {request}, of rollout {rollout}, at version {version}{also}, where this run "
                f"allows {max(before, rollout - max_staleness)} to {rollout}. Set schedule.max_staleness and "
                "schedule.groups_per_request as in the run that wrote it."
            )
        before = version
    if uneven := [rollout for rollout in range(num_requests // per_rollout) if sizes[rollout] != per_rollout]:
        raise ConfigError(
            f"{at} trains on {sizes[uneven[0]]} of the requests of this run with rollout {uneven[0]}, where this run "
            f"takes {per_rollout}. Set num_rollouts and schedule.groups_per_request as in the run that wrote it."
        )
    return {request: order[request] for request in range(num_requests)}


def _begun(line: Mapping[str, Any]) -> Begun:  # Any: JSON
    calls = {str(pool): tuple(int(each) for each in own) for pool, own in line.get("calls", {}).items()}
    trained = line.get("trained")
    return Begun(int(line["version"]), calls, None if trained is None else int(trained))
