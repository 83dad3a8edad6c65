"""Several instances of one engine, asked as one: calls go to whichever is free, and one that dies is replaced."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from unirl.rollout.engine.child.instance import Instance
from unirl.rollout.engine.child.messages import Message
from unirl.types.errors import WorkerError

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_MAX_LOSSES = 4
"""Processes that one call may end before it is taken for the cause."""
MAX_AT_ONCE = 32
"""Calls that an instance is given at once at most: each waits in a thread."""
_MAX_STARTS = 3
"""Processes that may die in a row, in the place of one, before they have the weights again."""


class InstancePool:
    """The instances of one engine. Its methods but `post` are called from one thread; instances work in others.

    restore: gives a process that has just started the present weights, and proves them. What each method raises of a
    process: see `EngineProcess.call`.
    """

    def __init__(self, instances: Sequence[Instance], restore: Callable[[Instance], None]) -> None:
        self._instances = list(instances)
        self._restore = restore
        self._threads = ThreadPoolExecutor(len(instances) * MAX_AT_ONCE, "unirl-engine")
        self._healing: dict[Future[Any], Instance] = {}  # Any: None
        self._left: Collection[Future[Any]] = ()
        """Calls that still run although one beside them has failed."""
        self._starting = threading.Lock()
        self._is_stopped = False
        self.num_restarts = 0
        """Processes that were started in the place of dead ones."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the instances."""
        return [instance.pid for instance in self._instances]

    def ready(self) -> Any:  # Any: the engine's own message
        """What the first instance said when it had loaded the model; waits for all."""
        return [instance.ready() for instance in self._instances][0]

    def post(self, message: Message) -> None:
        """Send to every living instance without waiting for an answer. Safe while another thread waits for answers."""
        for instance in self._instances:
            try:
                instance.post(message)
            except WorkerError:
                if instance.is_alive:
                    raise

    def broadcast(self, message: Message) -> list[Any]:  # Any: the engine's own messages
        """The answers of all living instances, perhaps none. One that dies is left to `heal`."""
        wait(self._left)
        asked = [instance for instance in self._instances if instance.is_alive]
        futures = [(instance, self._threads.submit(instance.call, message)) for instance in asked]
        wait([future for _, future in futures])
        answers = []
        for instance, future in futures:
            try:
                answers.append(future.result())
            except WorkerError as error:
                if instance.is_alive:
                    raise
                logger.warning("%s", error)
        return answers

    def answers(
        self,
        numbers: Sequence[int],
        prepare: Callable[[int], Message],
        read: Callable[[Message], AnswerT],
        at_once: int = 1,
    ) -> Generator[tuple[int, AnswerT]]:
        """The answer to each of some numbered calls as it comes, with its number; every call has exactly one.

        A call goes to the instance that is free first, of several to the one with the least to do. Those of an instance
        that dies go to the others.
        at_once: calls that an instance has at most, up to `MAX_AT_ONCE`. prepare: the message of a call, made here when
        an instance is free. read: of an answer, in a thread, while the instance's files are there.
        """
        wait(self._left)
        todo, losses = deque(numbers), dict.fromkeys(numbers, 0)
        messages: dict[int, Message] = {}
        running: dict[Future[Any], tuple[int, Instance]] = {}  # Any: AnswerT
        finished: list[tuple[int, AnswerT]] = []
        dead: set[int] = set()
        try:
            while todo or running or finished:
                self._replace_dead([instance for _, instance in running.values()])
                while todo and (instance := self._least_busy([each for _, each in running.values()], at_once)):
                    number = todo.popleft()
                    if number not in messages:
                        messages[number] = prepare(number)
                    running[self._threads.submit(_asked, instance, messages[number], read)] = (number, instance)
                while finished:  # what the caller does with them, it does while the instances work
                    yield finished.pop(0)
                done, _ = wait([*running, *self._healing], return_when=FIRST_COMPLETED)
                for future in done & self._healing.keys():
                    self._healed(future)
                for future in done & running.keys():
                    number, instance = running.pop(future)
                    try:
                        finished.append((number, future.result()))
                        del messages[number]
                    except WorkerError as error:
                        losses[number] += 1
                        if instance.is_alive or losses[number] >= _MAX_LOSSES:
                            raise
                        if instance.pid not in dead:  # once, not for each of its calls
                            logger.warning("%s\nIts samples go to the others.", error)
                        dead.add(instance.pid)
                        todo.appendleft(number)
        finally:
            self._left = list(running)

    def heal(self) -> None:
        """Return when there is a living process, with the present weights, in the place of every dead one."""
        self._replace_dead()
        for future in list(self._healing):
            self._healed(future)

    def stop(self) -> None:
        """End all processes. Safe to call twice."""
        with self._starting:
            self._is_stopped = True
        for instance in self._instances:
            instance.stop()
        self._threads.shutdown(cancel_futures=True)

    def _least_busy(self, busy: Sequence[Instance], at_once: int) -> Instance | None:
        """Of the living that have fewer calls than `at_once`, one with the fewest. busy: the instance of each call."""
        calls = {
            each: busy.count(each) for each in self._instances if each.is_alive and each not in self._healing.values()
        }
        free = [each for each, num in calls.items() if num < at_once]
        return min(free, key=calls.__getitem__, default=None)

    def _replace_dead(self, busy: Collection[Instance] = ()) -> None:
        """Begin to replace the dead; not those that are busy, whose answers may still be read."""
        for instance in self._instances:
            if not instance.is_alive and instance not in (*busy, *self._healing.values()):
                self._healing[self._threads.submit(self._replace, instance)] = instance

    def _replace(self, instance: Instance) -> None:
        """Start another process, and give it the weights; again where it dies meanwhile."""
        for attempt in range(1, _MAX_STARTS + 1):
            with self._starting:
                if self._is_stopped:
                    return
                instance.restart()
                self.num_restarts += 1
            try:
                instance.ready()
                self._restore(instance)
            except WorkerError as error:
                if instance.is_alive or attempt == _MAX_STARTS:
                    raise
                logger.warning("%s\nIt had just taken the place of a dead process. Starting another.", error)
            else:
                logger.warning("%s took the place of a dead process, with the present weights", instance.name)
                return

    def _healed(self, future: Future[Any]) -> None:
        """Wait for a replacement. Raises what it raised."""
        del self._healing[future]
        future.result()


def _asked(instance: Instance, message: Message, read: Callable[[Message], AnswerT]) -> AnswerT:
    return read(instance.call(message))
