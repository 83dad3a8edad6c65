"""Several members that do the same, asked as one: calls go to whichever is free, and one that dies is replaced."""

from __future__ import annotations

import bisect
import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
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
_AGAIN_S = 0.2
"""Seconds after which members are told again to end a call."""
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


class Gate(Protocol):
    """Says when numbered calls may begin, and hears when they do. The pool asks it under a lock, so it calls no pool;
    whoever opens it calls `MemberPool.wake`."""

    @property
    def order(self) -> int:
        """Calls of lower order begin first; those of equal order in the order in which they came."""
        ...

    def come(self) -> None:
        """The calls are known to the pool. Called without the lock."""
        ...

    def may_begin(self, number: int) -> bool:
        """True if the call could begin now."""
        ...

    def begin(self, number: int) -> bool:
        """True if the call begins now; it is under way until `ended`."""
        ...

    def ended(self, number: int, *, is_answered: bool) -> None:
        """A call that had begun is over. It begins again if it is not answered because its member died."""
        ...

    def check(self) -> None:
        """Raise what ends all these calls early."""
        ...


class OpenGate:
    """Lets every call begin. Implements Gate."""

    order = 0

    def come(self) -> None:
        """No one waits for them."""

    def may_begin(self, number: int) -> bool:
        return True

    def begin(self, number: int) -> bool:
        return True

    def ended(self, number: int, *, is_answered: bool) -> None:
        """Nothing waits for it."""

    def check(self) -> None:
        """Nothing ends them."""


OPEN = OpenGate()


def _is_whole(number: int, answer: object) -> None:
    del number, answer


@dataclass(eq=False)
class _Caller(Generic[MemberT]):
    """The calls of one `answers` that have not begun."""

    todo: deque[int]
    at_once: int
    gate: Gate
    ended: queue.SimpleQueue[Future[Any] | None]  # Any: AnswerT
    """Its calls that have ended; None where something else may let the next one begin."""
    begun_by: dict[int, MemberT] = field(default_factory=dict)
    """Who has made a part of a call, and may have kept what continues it."""
    messages: dict[int, Message] = field(default_factory=dict)
    """What to ask, of calls that have begun and are not whole."""
    losses: Counter[int] = field(default_factory=Counter)
    """How often the member of a call died."""

    def go_on(self, number: int, message: Message) -> None:
        """A call gave a part; it begins again before the others, with a message that continues it."""
        self.messages[number] = message
        self.todo.appendleft(number)

    def lose(self, number: int, error: WorkerError) -> None:
        """The member of a call died; it begins again before the others. Raises the error if that happened too often."""
        self.losses[number] += 1
        if self.losses[number] >= _MAX_LOSSES:
            raise error
        self.todo.appendleft(number)

    def wait_for_ended(self) -> list[Future[Any] | None]:  # Any: AnswerT
        """All that has come to `ended`; waits for the first."""
        found = [self.ended.get()]
        while not self.ended.empty():
            found.append(self.ended.get())
        return found

    @property
    def waits_for_a_member(self) -> bool:
        return any(self.gate.may_begin(number) for number in self.todo)


class _CallerQueue(Generic[MemberT]):
    """Those who have calls to make, in the order of their gates, and else in which they came. Used under the lock of
    the pool."""

    def __init__(self) -> None:
        self._callers: list[_Caller[MemberT]] = []

    def add(self, caller: _Caller[MemberT]) -> None:
        bisect.insort(self._callers, caller, key=lambda each: each.gate.order)

    def remove(self, caller: _Caller[MemberT]) -> None:
        self._callers.remove(caller)

    def is_next(self, own: _Caller[MemberT]) -> bool:
        """True if no one who came before has a call that could begin."""
        for caller in self._callers:
            if caller is own:
                return True
            if caller.waits_for_a_member:
                return False
        return True

    def wake_next(self) -> None:
        """Tell the first one whose call could begin, if it has a member."""
        caller = next((each for each in self._callers if each.waits_for_a_member), None)
        if caller is not None:
            caller.ended.put(None)

    def wake_all(self) -> None:
        """Tell everyone to look again which calls may begin."""
        for caller in self._callers:
            caller.ended.put(None)


@dataclass(frozen=True)
class _Lost:
    """What a call gives whose member died."""

    error: WorkerError


class _Replacements(Generic[MemberT]):
    """Processes that replace dead ones, each started in a thread, until it is stopped.

    restore: see `MemberPool`. changing: the lock of the pool, which guards who is being replaced.
    """

    def __init__(
        self, restore: Callable[[MemberT], None], threads: ThreadPoolExecutor, changing: threading.Condition
    ) -> None:
        self._restore = restore
        self._threads = threads
        self._changing = changing
        self._begun: dict[Future[None], MemberT] = {}
        self._starting = threading.Lock()
        self._is_stopped = False
        self._reported = set[MemberT]()
        """Dead members whose end the log has."""
        self.num_restarts = 0

    def report(self, member: MemberT, text: str) -> None:
        """Say how a process ended, once, not for each of its calls."""
        if member not in self._reported:
            self._reported.add(member)
            logger.warning("%s", text)

    @property
    def members(self) -> set[MemberT]:
        """Those that are being replaced. Read under the lock."""
        return set(self._begun.values())

    def begin(self, member: MemberT, on_end: Callable[[], None]) -> None:
        """Replace a dead member. Called under the lock. on_end: called when that is done, or has failed."""
        self.report(member, f"{member.name}: {member.death}")  # no call may have met its death
        future = self._threads.submit(self._replace, member)
        self._begun[future] = member
        future.add_done_callback(lambda _: on_end())

    def take_back(self) -> None:
        """Let those work that are replaced. Raises what replacing one raised, to one of those who ask."""
        for future in list(self._begun):
            if future.done():
                self._take_back(future)

    def wait_for(self, member: MemberT | None = None) -> None:
        """`take_back` one member, if it is being replaced, or all; waits for them."""
        for future, own in list(self._begun.items()):
            if member is None or own is member:
                self._take_back(future)

    def _take_back(self, future: Future[None]) -> None:
        wait([future])
        with self._changing:
            is_mine = self._begun.pop(future, None) is not None
        if is_mine:
            future.result()

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

    def stop(self) -> None:
        """Start no more."""
        with self._starting:
            self._is_stopped = True


class MemberPool(Generic[MemberT]):
    """The members, which work in threads. `answers`, `post` and `wake` may be called from several threads at once; all
    else from one, while no calls run.

    restore: gives a process that has just started the present weights, and proves them. What each method raises of a
    member: see `Member`.
    """

    def __init__(self, members: Sequence[MemberT], restore: Callable[[MemberT], None]) -> None:
        self._members = list(members)
        self._restore = restore
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "unirl-member")
        self._left: list[Future[Any]] = []
        """Calls that still run although another one has failed."""
        self._changing = threading.Condition()
        """Guards the members, what they do, and who waits for them. Notified when a call ends."""
        self._resting: set[MemberT] = set()
        self._calls: Counter[MemberT] = Counter()
        """Calls that run."""
        self._queue = _CallerQueue[MemberT]()
        self._replacements = _Replacements[MemberT](restore, self._threads, self._changing)

    @property
    def num_restarts(self) -> int:
        """Processes that replaced dead ones."""
        return self._replacements.num_restarts

    @property
    def members(self) -> tuple[MemberT, ...]:
        """Those of now, living or dead."""
        return tuple(self._members)

    @property
    def working(self) -> tuple[MemberT, ...]:
        """Members that get calls."""
        return tuple(member for member in self._members if member not in self._resting)

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
            _post(member, message)

    def broadcast(self, message: Message, among: Sequence[MemberT] | None = None) -> list[Any]:  # Any: the members' own
        """The answers of all living members, or of some, perhaps none. One that dies is left to `heal`."""
        wait(self._left)
        asked = [member for member in (self._members if among is None else among) if member.is_alive]
        futures = [(member, self._threads.submit(member.call, message)) for member in asked]
        wait([future for _, future in futures])
        answers = []
        for member, future in futures:
            try:
                answers.append(future.result())
            except WorkerError as error:
                if member.is_alive:
                    raise
                self._replacements.report(member, str(error))
        return answers

    def answers(
        self,
        numbers: Sequence[int],
        prepare: Callable[[int], Message],
        read: Callable[[Message], AnswerT],
        at_once: int = 1,
        gate: Gate = OPEN,
        go_on: Callable[[int, AnswerT], Message | None] = _is_whole,
    ) -> Generator[tuple[int, AnswerT]]:
        """The answer to each of some numbered calls as it comes, with its number; every call has exactly one.

        A call goes to the member that is free first, of several to the one with the least to do. Those of a member
        that dies go to the others. Where several threads ask, calls begin in the order of the gates, and else in which
        the threads came.
        at_once: calls that a member has at most, up to `MAX_AT_ONCE`. prepare: the message of a call, made here when
        a member is free. read: of an answer, in a thread, while the member's files are there. go_on: a message that
        continues a call whose answer is only a part, which then begins again, rather with the same member; None: it
        is whole.
        """
        wait(self._left)
        running: dict[Future[Any], int] = {}  # Any: AnswerT
        finished: deque[tuple[int, AnswerT]] = deque()
        own: _Caller[MemberT] = _Caller(deque(numbers), at_once, gate, queue.SimpleQueue())
        with self._changing:
            self._queue.add(own)
        try:
            gate.come()
            while own.todo or running or finished:
                gate.check()
                self._replacements.take_back()
                self._replace_dead()
                while claimed := self._claimed(own):
                    number, member = claimed
                    try:
                        if number not in own.messages:
                            own.messages[number] = prepare(number)
                        future = self._threads.submit(self._asked, member, own.messages[number], read, own, number)
                    except BaseException:
                        self._ended(member, own, number, is_answered=False)
                        raise
                    running[future] = number
                    own.begun_by[number] = member
                    future.add_done_callback(own.ended.put)
                while finished:  # what the caller does with them, it does while the members work
                    yield finished.popleft()
                if not own.todo and not running:
                    break  # those who replace the dead are not waited for
                for future in own.wait_for_ended() if running or self._will_wake(own) else ():
                    if future is None:
                        continue
                    number, answer = running.pop(future), future.result()
                    if isinstance(answer, _Lost):
                        own.lose(number, answer.error)
                    elif (more := go_on(number, answer)) is None:
                        finished.append((number, answer))
                        del own.messages[number]
                    else:
                        own.go_on(number, more)
        finally:
            with self._changing:
                self._queue.remove(own)
                self._left = [future for future in (*self._left, *running) if not future.done()]
                self._queue.wake_next()

    def rest(self, members: Sequence[MemberT], ends_calls: Sequence[Message] = ()) -> None:
        """Give some members no more calls until `work`. Returns when none of theirs runs. One that dies meanwhile is
        replaced after `work`.

        ends_calls: messages without answer that end calls early; none: they run to their ends.
        """

        def is_quiet() -> bool:
            return not any(self._calls[member] for member in members)

        with self._changing:
            self._resting.update(members)
        while not is_quiet():
            for member in members:
                for message in ends_calls:
                    _post(member, message)  # again, since a call may just have begun
            with self._changing:
                self._changing.wait_for(is_quiet, _AGAIN_S if ends_calls else None)

    def work(self, members: Sequence[MemberT]) -> None:
        """Give members calls again that rested."""
        with self._changing:
            self._resting.difference_update(members)
        self.wake()

    def wake(self) -> None:
        """Look again which calls may begin; called when a gate has opened."""
        with self._changing:
            self._queue.wake_all()

    def _claimed(self, own: _Caller[MemberT]) -> tuple[int, MemberT] | None:
        """The next call of a caller, and who gets it; None if no member is free, or others come first."""
        with self._changing:
            if not self._queue.is_next(own) or (freest := self._least_busy(own.at_once)) is None:
                return None
            number = next((number for number in own.todo if own.gate.begin(number)), None)
            if number is None:
                return None
            begun_by = own.begun_by.get(number)
            member = begun_by if begun_by is not None and self._is_free(begun_by, own.at_once) else freest
            own.todo.remove(number)
            self._calls[member] += 1
            if not own.waits_for_a_member:
                self._queue.wake_next()
            return number, member

    def _will_wake(self, own: _Caller[MemberT]) -> bool:
        """True if something will happen that this caller is told of."""
        with self._changing:
            is_due = self._queue.is_next(own) and own.waits_for_a_member
            return not is_due or bool(self._replacements.members) or any(self._calls.values()) or not self.working

    def _asked(
        self,
        member: MemberT,
        message: Message,
        read: Callable[[Message], AnswerT],
        caller: _Caller[MemberT],
        number: int,
    ) -> AnswerT | _Lost:
        is_answered = False
        try:
            answer = read(member.call(message))
            is_answered = True
        except WorkerError as error:
            if member.is_alive:
                raise
            self._replacements.report(member, f"{error}\nIts samples go to the others.")
            return _Lost(error)
        finally:
            self._ended(member, caller, number, is_answered=is_answered)
        return answer

    def _ended(self, member: MemberT, caller: _Caller[MemberT], number: int, *, is_answered: bool) -> None:
        with self._changing:
            self._calls[member] -= 1
            self._changing.notify_all()
        caller.gate.ended(number, is_answered=is_answered)
        with self._changing:
            self._queue.wake_next()

    def heal(self) -> None:
        """Return when a living process with the present weights has replaced every dead one."""
        self._replace_dead()
        self._replacements.wait_for()
        self.wake()

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
        with self._changing:
            self._members.append(member)
        self.wake()

    def leave(self, member: MemberT) -> None:
        """Stop a member, which has answered its calls. Raises ConfigError for the last one."""
        if len(self._members) == 1:
            raise ConfigError(f"{member.name} is the last member of its pool, which cannot be scaled to zero.")
        wait(self._left)
        self._replacements.wait_for(member)
        with self._changing:
            self._members.remove(member)
            self._resting.discard(member)
        member.stop()

    def stop(self) -> None:
        """End all processes. Safe to call twice."""
        self._replacements.stop()
        for member in self._members:
            member.stop()
        self._threads.shutdown(cancel_futures=True)

    def _least_busy(self, at_once: int) -> MemberT | None:
        """The first living member with the fewest calls, if that is fewer than `at_once`."""
        busy = {*self._replacements.members, *self._resting}
        found, fewest = None, at_once
        for member in self._members:
            num = self._calls[member]
            if num < fewest and member.is_alive and member not in busy:
                if not num:
                    return member
                found, fewest = member, num
        return found

    def _is_free(self, member: MemberT, at_once: int) -> bool:
        """True if a member works here, and has fewer calls than `at_once`."""
        is_here = member in self.working and member not in self._replacements.members
        return is_here and member.is_alive and self._calls[member] < at_once

    def _replace_dead(self) -> None:
        """Begin to replace the dead; not those with calls that run, whose answers may still be read."""
        with self._changing:
            begun = self._replacements.members
            for member in self.working:
                if not member.is_alive and not self._calls[member] and member not in begun:
                    self._replacements.begin(member, self.wake)


def _post(member: Member, message: Message) -> None:
    try:
        member.post(message)
    except WorkerError:
        if member.is_alive:
            raise
