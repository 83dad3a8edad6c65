"""Several members that do the same, asked as one: calls go to whichever is free, and one that dies is replaced."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from unirl.types.errors import ConfigError, UniRLError, WorkerError

logger = logging.getLogger(__name__)

Message = Any
"""What a member is asked; each kind of member has its own."""
AnswerT = TypeVar("AnswerT")

_MAX_LOSSES = 4
"""Processes that one call may end before it is taken for the cause."""
MAX_AT_ONCE = 32
"""Calls that a member is given at once at most: each waits in a thread."""
_MAX_THREADS = 1024
"""Most calls at once of a pool; a thread is made when it is needed."""
_MAX_STARTS = 3
"""Processes that may die in a row, one replacing the other, before one has the weights again."""


class Member(Protocol):
    """What a pool needs of a member, which loads while the caller does something else: a child process, or a worker on
    any node."""

    @property
    def pid(self) -> int:
        """Id of the present process."""
        ...

    @property
    def name(self) -> str:
        """As errors call it, with the process."""
        ...

    @property
    def is_alive(self) -> bool:
        """True if the process runs, as far as is known."""
        ...

    @property
    def death(self) -> str:
        """How a process that is not alive ended, with the end of its log."""
        ...

    def ready(self) -> Any:  # Any: the member's own message
        """What it says when it has loaded; waits for it once. Raises WorkerError if it died."""
        ...

    def call(self, message: Message) -> Any:  # Any: the member's own answer
        """The answer to a message. Raises WorkerError if the process dies or is too late, which ends it."""
        ...

    def post(self, message: Message) -> None:
        """Send what has no answer, from any thread."""
        ...

    def restart(self) -> None:
        """Begin another process instead of this one."""
        ...

    def stop(self) -> None:
        """End the process. Safe to call twice."""
        ...


MemberT = TypeVar("MemberT", bound=Member)


class MemberPool(Generic[MemberT]):
    """The members. Its methods but `post` are called from one thread; members work in others.

    restore: gives a process that has just started the present weights, and proves them. What each method raises of a
    member: see `Member`.
    """

    def __init__(self, members: Sequence[MemberT], restore: Callable[[MemberT], None]) -> None:
        self._members = list(members)
        self._restore = restore
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "unirl-member")
        self._healing: dict[Future[Any], MemberT] = {}  # Any: None
        self._left: Collection[Future[Any]] = ()
        """Calls that still run although another one has failed."""
        self._starting = threading.Lock()
        self._is_stopped = False
        self._reported = set[MemberT]()
        """Dead members whose end the log has."""
        self.num_restarts = 0
        """Processes that replaced dead ones."""

    @property
    def members(self) -> tuple[MemberT, ...]:
        """Those of now, living or dead."""
        return tuple(self._members)

    @property
    def pids(self) -> list[int]:
        """Process ids of the members."""
        return [member.pid for member in self._members]

    def ready(self) -> Any:  # Any: the member's own message
        """What the first member said when it had loaded the model; waits for all."""
        return [member.ready() for member in self._members][0]

    def post(self, message: Message) -> None:
        """Send to every living member without waiting for an answer. Safe while another thread waits for answers."""
        for member in self._members:
            try:
                member.post(message)
            except WorkerError:
                if member.is_alive:
                    raise

    def broadcast(self, message: Message) -> list[Any]:  # Any: the members' own
        """The answers of all living members, perhaps none. One that dies is left to `heal`."""
        wait(self._left)
        asked = [member for member in self._members if member.is_alive]
        futures = [(member, self._threads.submit(member.call, message)) for member in asked]
        wait([future for _, future in futures])
        answers = []
        for member, future in futures:
            try:
                answers.append(future.result())
            except WorkerError as error:
                if member.is_alive:
                    raise
                self._report(member, str(error))
        return answers

    def answers(
        self,
        numbers: Sequence[int],
        prepare: Callable[[int], Message],
        read: Callable[[Message], AnswerT],
        at_once: int = 1,
    ) -> Generator[tuple[int, AnswerT]]:
        """The answer to each of some numbered calls as it comes, with its number; every call has exactly one.

        A call goes to the member that is free first, of several to the one with the least to do. Those of a member
        that dies go to the others.
        at_once: calls that a member has at most, up to `MAX_AT_ONCE`. prepare: the message of a call, made here when
        a member is free. read: of an answer, in a thread, while the member's files are there.
        """
        wait(self._left)
        todo, losses = deque(numbers), dict.fromkeys(numbers, 0)
        messages: dict[int, Message] = {}
        running: dict[Future[Any], tuple[int, MemberT]] = {}  # Any: AnswerT
        calls: Counter[MemberT] = Counter()
        finished: deque[tuple[int, AnswerT]] = deque()
        # With hundreds of members, asking every running call after each answer would take longer than the calls.
        ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()  # Any: AnswerT, or None of a replacement
        watched = set[Future[Any]]()  # Any: None
        try:
            while todo or running or finished:
                self._replace_dead(calls)
                while todo and (member := self._least_busy(calls, at_once)):
                    number = todo.popleft()
                    if number not in messages:
                        messages[number] = prepare(number)
                    future = self._threads.submit(_asked, member, messages[number], read)
                    running[future] = (number, member)
                    calls[member] += 1
                    future.add_done_callback(ended.put)
                for future in self._healing.keys() - watched:
                    watched.add(future)
                    future.add_done_callback(ended.put)
                while finished:  # what the caller does with them, it does while the members work
                    yield finished.popleft()
                if not todo and not running:
                    break  # those who replace the dead are not waited for
                for future in _all_of(ended) if running or self._healing else ():
                    if future in self._healing:
                        self._healed(future)
                    if future not in running:
                        continue
                    number, member = running.pop(future)
                    calls[member] -= 1
                    try:
                        finished.append((number, future.result()))
                        del messages[number]
                    except WorkerError as error:
                        losses[number] += 1
                        if member.is_alive or losses[number] >= _MAX_LOSSES:
                            raise
                        self._report(member, f"{error}\nIts samples go to the others.")
                        todo.appendleft(number)
        finally:
            self._left = list(running)

    def heal(self) -> None:
        """Return when a living process with the present weights has replaced every dead one."""
        self._replace_dead()
        for future in list(self._healing):
            self._healed(future)

    def join(self, member: MemberT) -> None:
        """Give a new member the present weights, prove it, and let it work.

        Raises what starting and proving it raises; then it is stopped, and the pool is as it was.
        """
        try:
            member.ready()
            self._restore(member)
        except UniRLError:
            member.stop()
            raise
        self._members.append(member)

    def leave(self, member: MemberT) -> None:
        """Stop a member, which has answered its calls. Raises ConfigError for the last one."""
        if len(self._members) == 1:
            raise ConfigError(f"{member.name} is the last member of its pool, which cannot be scaled to zero.")
        wait(self._left)
        for future in [future for future, own in self._healing.items() if own is member]:
            self._healed(future)
        self._members.remove(member)
        member.stop()

    def stop(self) -> None:
        """End all processes. Safe to call twice."""
        with self._starting:
            self._is_stopped = True
        for member in self._members:
            member.stop()
        self._threads.shutdown(cancel_futures=True)

    def _least_busy(self, calls: Mapping[MemberT, int], at_once: int) -> MemberT | None:
        """The first living member with the fewest calls, if that is fewer than `at_once`. calls: those that run."""
        healing = set(self._healing.values())
        found, fewest = None, at_once
        for member in self._members:
            num = calls.get(member, 0)
            if num < fewest and member.is_alive and member not in healing:
                if not num:
                    return member
                found, fewest = member, num
        return found

    def _replace_dead(self, calls: Mapping[MemberT, int] = MappingProxyType({})) -> None:
        """Begin to replace the dead; not those with calls that run, whose answers may still be read."""
        for member in self._members:
            if not member.is_alive and not calls.get(member) and member not in self._healing.values():
                self._report(member, f"{member.name}: {member.death}")  # no call may have met its death
                self._healing[self._threads.submit(self._replace, member)] = member

    def _report(self, member: MemberT, text: str) -> None:
        """Say how a process ended, once, not for each of its calls."""
        if member not in self._reported:
            self._reported.add(member)
            logger.warning("%s", text)

    def _replace(self, member: MemberT) -> None:
        """Start another process, and give it the weights; again where it dies meanwhile."""
        for attempt in range(1, _MAX_STARTS + 1):
            with self._starting:
                if self._is_stopped:
                    return
                self._reported.discard(member)
                member.restart()
                self.num_restarts += 1
            try:
                member.ready()
                self._restore(member)
            except WorkerError as error:
                if member.is_alive or attempt == _MAX_STARTS:
                    raise
                logger.warning("%s\nIt had just taken the place of a dead process. Starting another.", error)
            else:
                logger.warning("%s took the place of a dead process, with the present weights", member.name)
                return

    def _healed(self, future: Future[Any]) -> None:
        """Wait for a replacement. Raises what it raised."""
        del self._healing[future]
        future.result()


def _all_of(ended: queue.SimpleQueue[Future[Any]]) -> list[Future[Any]]:  # Any: as in `MemberPool.answers`
    """All that have ended; waits for the first."""
    found = [ended.get()]
    while not ended.empty():
        found.append(ended.get())
    return found


def _asked(member: MemberT, message: Message, read: Callable[[Message], AnswerT]) -> AnswerT:
    return read(member.call(message))
