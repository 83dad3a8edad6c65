"""A process that plays episodes: `python -m unirl.rollout.environments.process CALLS LIFE MARK`, two file descriptors
and the mark of the programs that episodes start (`unirl.rollout.environments.programs`), empty without.

CALLS is a connection of `multiprocessing`: first the import path, then the prototype and the limit of memory, then
lists of calls, each answered by one message per call, in order. LIFE is never written to: it closes when the owner
dies, however it dies.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from unirl.rollout.environments import wire
from unirl.rollout.environments.base import Environment, Step, Task, reason_of
from unirl.rollout.environments.programs import end_programs
from unirl.types.errors import ConfigError

Answer = Any  # Any: an observation, or the `Step` of one


@dataclass(frozen=True)
class Reset:
    """Begin an episode."""

    episode: str
    task: Task
    seed: int


@dataclass(frozen=True)
class Act:
    """Take a step of an episode."""

    episode: str
    action: Any  # Any: as the environment takes it


@dataclass(frozen=True)
class Restore:
    """Continue an episode that another process has begun."""

    episode: str
    state: Any  # Any: of the class's own


@dataclass(frozen=True)
class Close:
    """Forget an episode."""

    episode: str


Call = Reset | Act | Restore | Close


@dataclass(frozen=True)
class Answered:
    """What a call gave."""

    answer: Answer
    state: Any = None  # Any: of the class's own
    """The episode's, where the class is resumable."""


@dataclass(frozen=True)
class Raised:
    """Why a call gave nothing."""

    reason: str


def main(calls: int, life: int, mark: str = "") -> None:
    """Play until the owner closes the connection."""
    threading.Thread(target=_end_with_owner, args=(life, mark), daemon=True).start()
    with Connection(calls) as owner:
        try:
            sys.path += [place for place in wire.receive(owner) if place not in sys.path]
            prototype, memory_bytes = wire.receive(owner)
            if memory_bytes is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
            prototype.prepare()
        except EOFError:
            return
        except ConfigError as error:
            wire.send(owner, Raised(str(error)))
            return
        except BaseException:
            wire.send(owner, Raised(traceback.format_exc()))
            raise
        wire.send(owner, Answered(None))
        episodes: dict[str, Environment[Any, Any]] = {}  # Any: of whatever acts
        while True:
            try:
                batch: Sequence[Call] = wire.receive(owner)
            except EOFError:
                return
            for call in batch:
                wire.send(owner, _answer(call, prototype, episodes))


def _answer(
    call: Call,
    prototype: Environment[Any, Any],  # Any: of whatever acts
    episodes: dict[str, Environment[Any, Any]],
) -> Answered | Raised:
    try:
        if isinstance(call, Close):
            episodes.pop(call.episode).close()
            return Answered(None)
        if isinstance(call, (Reset, Restore)):
            episodes[call.episode] = prototype.fresh()
        own = episodes[call.episode]
        if isinstance(call, Restore):
            own.restore(call.state)
            return Answered(None)
        answer = own.reset(call.task, call.seed) if isinstance(call, Reset) else checked(own.step(call.action))
        return Answered(answer, own.save() if own.resumable else None)
    except Exception as error:  # noqa: BLE001 - the owner counts the episode as failed and says why
        return Raised(reason_of(error))


def checked(step: Step[Any]) -> Step[Any]:  # Any: whatever is observed
    """The step. Raises TypeError or ValueError if it is none, or its reward is no finite number."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned {type(step).__name__}; return a Step of unirl.rollout.environments.base")
    if not math.isfinite(step.reward):
        raise ValueError(f"the reward of a step is {step.reward}, which is no finite number")
    return step


def _end_with_owner(life: int, mark: str) -> None:
    os.read(life, 1)
    if mark:
        end_programs(mark)
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    # Under another name than this module's, what is unpickled would be of other classes.
    from unirl.rollout.environments import process

    process.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
