"""The order of a run: with which version of the weights its requests began. Repeated, it gives the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from unirl.config.schema import Schedule
from unirl.types.errors import ConfigError

REQUESTS = "requests.jsonl"
"""File of a run directory: a line per request with `request`, its number, `rollout` and `version`. Of a resumed run the
last line of a number counts."""


class OrderLog:
    """Appends what the engine begins."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begun(self, request: int, rollout: int, version: int) -> None:
        """Add a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"request": request, "rollout": rollout, "version": version}) + "\n")


def order_of(schedule: Schedule, batch_size: int, num_rollouts: int) -> Mapping[int, int] | None:
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


def read_order(path: Path, *, num_requests: int, per_rollout: int, max_staleness: int) -> Mapping[int, int]:
    """Request of this run -> version of the weights with which it begins. The file may have more.

    Raises ConfigError for a file that cannot be read, that lacks requests of the run, or whose order the run's slots do
    not allow: versions that fall, or a request that would be trained on before it begins or more than `max_staleness`
    versions after.
    """
    at = f"schedule.replay = {path}"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        order = {int(line["request"]): int(line["version"]) for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{at} cannot be read ({type(error).__name__}: {error}). Name the {REQUESTS} of a run directory."
        ) from error
    before = 0
    for request in range(num_requests):
        version, rollout = order.get(request), request // per_rollout
        if version is None:
            raise ConfigError(
                f"{at} has no request {request} of {num_requests}. Set num_rollouts and schedule.groups_per_request as "
                "in the run that wrote it."
            )
        if not max(before, rollout - max_staleness) <= version <= rollout:
            raise ConfigError(
                f"{at} begins request {request}, of rollout {rollout}, at version {version}, where this run allows "
                f"{max(before, rollout - max_staleness)} to {rollout}. Set schedule.max_staleness and "
                "schedule.groups_per_request as in the run that wrote it."
            )
        before = version
    return {request: order[request] for request in range(num_requests)}
