"""Waits for an answer of every worker, and finds the cause if some fail.

Failures rarely come alone. A rank that dies breaks the collective that the others are in, so they fail too, often
before the death is known; a rank that raises leaves the others waiting in the collective forever. So after the first
failure the other ranks get a few seconds to answer, the cause is chosen among the failures, and ranks that still hang
are reported.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from unirl.distributed.group.framework import ray_module
from unirl.distributed.group.ray_worker import CONTROL
from unirl.types.errors import UniRLError, WorkerError
from unirl.types.heartbeat import BEAT_S, Heartbeat

logger = logging.getLogger(__name__)

SETTLE_S = 5.0
"""Time that the other ranks get to answer after one has failed."""
SLOW_S = 600.0
"""After this time, and each doubling of it, a warning lists workers that have not answered and what they are doing."""
REPORT_S = 5.0
"""Time that a worker gets to report what it is doing."""

_SILENT = "silent: its process is stopped, or holds the interpreter's lock. "
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_BROKEN_COLLECTIVE = re.compile(r"gloo|nccl|connection (closed|reset) by peer|process ?group", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """One worker's failure."""

    worker: str
    error: Any  # Any: a ray.exceptions.RayError, and ray may be absent

    @property
    def is_death(self) -> bool:
        """True if the process has died."""
        return not isinstance(self.error, ray_module().exceptions.RayTaskError)

    @property
    def text(self) -> str:
        """The worker's traceback, or what Ray knows about its death."""
        text = _COLOUR.sub("", str(self.error)).strip()
        return f"the process died. Ray says: {text}" if self.is_death else text

    @property
    def distance(self) -> int:
        """0 for a likely cause, more for a likely consequence."""
        return 0 if self.is_death else 2 if _BROKEN_COLLECTIVE.search(str(self.error)) else 1


class CallFailed(Exception):
    """Some workers failed. is_settled: all workers have answered, and all processes are alive."""

    def __init__(self, failures: Sequence[Failure], is_settled: bool) -> None:
        super().__init__()
        self.failures = sorted(failures, key=lambda failure: failure.distance)
        self.is_settled = is_settled

    def raise_cause(self) -> NoReturn:
        """Raise the cause: a UniRLError as the worker raised it, anything else as WorkerError."""
        first, *others = self.failures
        named = WorkerError(first.worker, first.text)
        for other in others:
            named.add_note(f"worker {other.worker} failed too: {other.text.splitlines()[-1]}")
        original = None if first.is_death else first.error.cause
        if isinstance(original, UniRLError):
            original.add_note(f"raised in worker {first.worker}")
            raise original from named
        raise named from None


class Heartbeats:
    """Asks workers for signs of life in their lane of control while their answers are waited for.

    workers: `RayWorker`s by name.
    """

    def __init__(self, workers: Mapping[str, Any]) -> None:  # Any: ray actor handles
        self._workers = dict(workers)
        self._beats = {name: Heartbeat(name) for name in workers}
        self._asked: dict[Any, str] = {}  # Any: ray object references

    def ask(self, names: Iterable[str], timeout_s: float = 0.0) -> None:
        """Take what has been answered within `timeout_s`, and ask those again that have."""
        ray = ray_module()
        waiting = set(self._asked.values())
        for name in names:
            if name in self._workers and name not in waiting:
                report = self._workers[name].report.options(concurrency_group=CONTROL).remote()
                self._asked[report] = name
        if not self._asked:
            return
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=timeout_s)
        for reference in answered:
            name = self._asked.pop(reference)
            try:
                self._beats[name].beat(ray.get(reference))
            except ray.exceptions.RayError:
                continue  # the call that is waited for fails of the same death, and says so

    def warnings(self, names: Iterable[str]) -> list[str]:
        """One text for each worker that has been silent for long."""
        found = [self._beats[name].silence() for name in names if name in self._beats]
        return [text for text in found if text is not None]

    def reports(self, names: Iterable[str]) -> str:
        """What workers are doing, one text each, or were doing when they were heard last."""
        names = [name for name in names if name in self._workers]
        self.ask(names, REPORT_S)
        silent = set(self._asked.values())
        return "\n".join(
            f"{name}: {_SILENT + self._beats[name].last if name in silent else self._beats[name].report}"
            for name in names
        )


def answers(
    pending: Mapping[Any, str],
    what: str,
    timeout_s: float,
    actors: Mapping[str, Any] | None = None,  # Any: ray actor handles
) -> list[Any]:
    """The results of the object references `pending` (reference -> worker), in order.

    actors: `RayWorker`s by name; slow ones are asked what they are doing, for warnings and errors.
    Raises CallFailed, or WorkerError naming the workers that did not answer within `timeout_s`.
    """
    ray = ray_module()
    begin = time.monotonic()
    deadline, slow, beat = begin + timeout_s, begin + SLOW_S, begin + BEAT_S
    waiting = dict(pending)
    beats = Heartbeats(actors or {})
    results: dict[Any, Any] = {}
    failures: list[Failure] = []
    while waiting:
        until = min(deadline, slow, beat) if actors else deadline
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, until - time.monotonic()))
        if not ready and until >= deadline:
            break
        if not ready and until >= slow:
            logger.warning("%s takes longer than %.0f s%s", what, slow - begin, _reported(waiting.values(), beats))
            slow = begin + 2 * (slow - begin)
        elif not ready:
            beats.ask(waiting.values())
            for text in beats.warnings(waiting.values()):
                logger.warning("%s waits: %s", what, text)
            beat = time.monotonic() + BEAT_S
        for reference in ready:
            worker = waiting.pop(reference)
            try:
                results[reference] = ray.get(reference)
            except ray.exceptions.RayError as error:
                failure = Failure(worker, error)
                failures.append(failure)
                deadline = min(deadline, time.monotonic() + (0.0 if failure.is_death else SETTLE_S))
    if failures:
        is_settled = not waiting and not any(failure.is_death for failure in failures)
        raise CallFailed(failures, is_settled)
    if waiting:
        raise WorkerError(
            ", ".join(waiting.values()),
            f"no answer to {what} within {timeout_s:.0f} s. If the work is that long, raise cluster.timeout_s; "
            "otherwise ranks wait for one another: look for a collective that not every rank reaches."
            + _reported(waiting.values(), beats),
        )
    return [results[reference] for reference in pending]


def _reported(waiting: Iterable[str], beats: Heartbeats) -> str:
    """What the workers that did not answer are doing, on further lines."""
    found = beats.reports(waiting)
    return f"\n{found}" if found else ""
