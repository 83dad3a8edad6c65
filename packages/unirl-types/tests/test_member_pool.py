"""A pool of members: calls go to whichever is free, nothing is lost or made twice where members die."""

import threading
from typing import Any

import pytest

from unirl.types.errors import ContractError, WorkerError
from unirl.types.member_pool import MemberPool


class FakeMember:
    """Stands for a process: answers a message with it and its own id, and dies of each in `deadly` once."""

    def __init__(self, pid, deadly=frozenset()):
        self.pid, self.name, self.is_alive, self.death = pid, f"fake (pid {pid})", True, "it was ended"
        self.deadly: Any = deadly
        self.asked, self.num_starts, self.dies_at_start = [], 1, 0

    def ready(self):
        if self.dies_at_start:
            self.dies_at_start -= 1
            self._die()
        return "ready"

    def call(self, message):
        if not self.is_alive:
            raise WorkerError(self.name, "it is dead")
        self.asked.append(message)
        if message in self.deadly:
            self.deadly.remove(message)
            self._die()
        return message, self.pid

    def restart(self):
        self.is_alive, self.num_starts = True, self.num_starts + 1

    def stop(self):
        self.is_alive = False

    def _die(self):
        self.is_alive = False
        raise WorkerError(self.name, "it died")


def pool_of(*members, restore: Any = lambda member: None):
    fakes: Any = members
    return MemberPool(fakes, restore)


def asked(pool, num):
    """number -> what its answer was made of; raises where a call has two answers."""
    found = {}
    for number, answer in pool.answers(range(num), lambda number: number, lambda answer: answer):
        assert number not in found
        found[number] = answer
    return found


def test_a_call_goes_to_the_member_that_is_free_first():
    class Slow(FakeMember):
        def call(self, message):
            assert fast.has_done_the_rest.wait(60)
            return super().call(message)

    class Fast(FakeMember):
        has_done_the_rest = threading.Event()

        def call(self, message):
            answer = super().call(message)
            if len(self.asked) == 8:
                self.has_done_the_rest.set()
            return answer

    slow, fast = Slow(1), Fast(2)
    found = asked(pool_of(slow, fast), 9)
    assert [found[number][0] for number in range(9)] == list(range(9))
    assert len(slow.asked) == 1 and len(fast.asked) == 8


def test_what_an_member_left_unfinished_goes_to_the_others_once():
    deadly = {0, 3, 4}  # each ends the first process that is asked
    first, second = FakeMember(1, deadly), FakeMember(2, deadly)
    restored = []
    pool = pool_of(first, second, restore=lambda member: restored.append(member.pid))
    found = asked(pool, 8)
    assert sorted(found) == list(range(8)) and all(found[number][0] == number for number in found)
    pool.heal()
    assert first.is_alive and second.is_alive
    assert pool.num_restarts == len(restored) == first.num_starts + second.num_starts - 2 == 3
    assert sorted(first.asked + second.asked) == sorted([*range(8), 0, 3, 4])


def test_a_member_that_died_between_calls_is_replaced_and_its_end_is_reported_once(caplog):
    first, second = FakeMember(1), FakeMember(2)
    pool = pool_of(first, second)
    first.stop()
    assert pool.broadcast("push") == [("push", 2)]
    pool.heal()
    assert first.is_alive and caplog.text.count("fake (pid 1): it was ended") == 1
    first.deadly = {0}
    assert len(asked(pool, 3)) == 3
    pool.heal()
    assert caplog.text.count("it died") == 1 and caplog.text.count("it was ended") == 1


def test_a_replacement_that_takes_long_keeps_no_answer_back():
    first, second = FakeMember(1), FakeMember(2)
    is_restored = threading.Event()

    def restore(member):
        assert is_restored.wait(20)

    pool = pool_of(first, second, restore=restore)
    first.stop()
    assert asked(pool, 4) == {number: (number, 2) for number in range(4)} and not is_restored.is_set()
    is_restored.set()
    pool.heal()
    assert first.is_alive and second.is_alive


def test_a_call_that_ends_every_process_ends_the_run():
    class Poisoned(FakeMember):
        def call(self, message):
            self.deadly = {1}
            return super().call(message)

    pool = pool_of(Poisoned(1), Poisoned(2))
    with pytest.raises(WorkerError, match="it died"):
        asked(pool, 3)
    assert pool.num_restarts <= 4


def test_a_process_that_dies_again_and_again_while_it_starts_ends_the_run():
    member = FakeMember(1, {0})
    member.dies_at_start = 2
    assert asked(pool_of(member), 2) == {0: (0, 1), 1: (1, 1)}  # the third start holds
    assert member.num_starts == 4
    member.deadly, member.dies_at_start = {0}, 3
    with pytest.raises(WorkerError, match="it died"):
        asked(pool_of(member), 2)


def test_what_the_engine_itself_refuses_is_raised_and_replaces_nothing():
    class Refusing(FakeMember):
        def call(self, message):
            raise ContractError("no such step")

    pool = pool_of(Refusing(1), Refusing(2))
    with pytest.raises(ContractError, match="no such step"):
        asked(pool, 2)
    with pytest.raises(ContractError, match="no such step"):
        pool.broadcast("push")
    assert pool.num_restarts == 0


def test_a_push_reaches_all_and_is_given_later_to_one_that_died_of_it():
    first, second = FakeMember(1), FakeMember(2, {"push"})
    pool = pool_of(first, second)
    assert pool.broadcast("push") == [("push", 1)]
    assert pool.broadcast("more") == [("more", 1)]
    assert second.asked == ["push"] and second.num_starts == 1
    pool.heal()
    assert pool.broadcast("next") == [("next", 1), ("next", 2)]


def test_a_push_that_no_member_survives_is_left_to_those_in_their_place():
    first, second = FakeMember(1, {"push"}), FakeMember(2, {"push"})
    pool = pool_of(first, second)
    assert pool.broadcast("push") == pool.broadcast("more") == []
    pool.heal()
    assert pool.broadcast("next") == [("next", 1), ("next", 2)]


def test_dealing_calls_compares_no_member_with_every_running_call():
    class Compared(FakeMember):
        num_compared = 0

        def __eq__(self, other):
            Compared.num_compared += 1
            return self is other

        def __hash__(self):
            return self.pid % 1000  # as even as ids of objects

    pool = pool_of(*[Compared(pid) for pid in range(100)])
    assert len(asked(pool, 400)) == 400
    assert Compared.num_compared < 400, "100 members times the calls that run would be thousands for each call"


class Door:
    """A gate that the test opens."""

    def __init__(self):
        self.is_open, self.begun, self.over = False, [], []
        self.error: Any = None

    order = 0

    def come(self):
        """Nothing waits."""

    def may_begin(self, number):
        return self.is_open

    def begin(self, number):
        if self.is_open:
            self.begun.append(number)
        return self.is_open

    def ended(self, number, *, is_answered):
        self.over.append((number, is_answered))

    def check(self):
        if self.error is not None:
            raise self.error


def in_a_thread(work):
    """Start it; returns what waits for what it gives, or raises what it raises."""
    found: list[Any] = []

    def run():
        try:
            found.append(work())
        except ContractError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(60)
        assert found, "it waits"
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return result


def gated(pool, numbers, gate, at_once=1):
    return dict(pool.answers(numbers, lambda number: number, lambda answer: answer, at_once, gate))


def test_calls_of_several_threads_begin_in_the_order_of_the_threads_and_fill_every_member():
    class Held(FakeMember):
        def call(self, message):
            begun.append(message)
            if len(begun) == 3:
                three.set()
            assert may_end.wait(60)
            return super().call(message)

    begun: list[Any] = []
    three, may_end = threading.Event(), threading.Event()
    pool = pool_of(Held(1), Held(2), Held(3))
    first = in_a_thread(lambda: gated(pool, [0, 1], Opened()))
    while len(begun) < 2:
        pass
    second = in_a_thread(lambda: gated(pool, [10, 11, 12], Opened()))
    assert three.wait(60) and sorted(begun) == [0, 1, 10], "the third member does not wait for the first request"
    may_end.set()
    assert set(first()) == {0, 1} and set(second()) == {10, 11, 12}
    assert begun[3:] == [11, 12]


class Opened(Door):
    def __init__(self):
        super().__init__()
        self.is_open = True


def test_calls_wait_for_their_gate_while_those_of_others_pass():
    member = FakeMember(1)
    pool, door = pool_of(member), Door()
    waits = in_a_thread(lambda: gated(pool, [0, 1], door))
    assert set(asked(pool, 3)) == {0, 1, 2} and not door.begun
    door.is_open = True
    pool.wake()
    assert set(waits()) == {0, 1} and door.begun == [0, 1] and door.over == [(0, True), (1, True)]
    closed = Door()
    ends = in_a_thread(lambda: gated(pool, [0], closed))
    closed.error = ContractError("the run ends")
    pool.wake()
    with pytest.raises(ContractError, match="the run ends"):
        ends()


def test_a_call_whose_member_died_has_begun_twice_and_is_answered_once():
    pool, door = pool_of(FakeMember(1, {0}), FakeMember(2)), Opened()
    assert set(gated(pool, [0, 1, 2], door)) == {0, 1, 2}
    assert sorted(door.begun) == [0, 0, 1, 2]
    assert sorted(door.over) == [(0, False), (0, True), (1, True), (2, True)]


def test_a_message_that_cannot_be_made_leaves_its_member_free():
    pool, door = pool_of(FakeMember(1)), Opened()

    def prepare(number):
        raise ContractError("no such sample")

    with pytest.raises(ContractError, match="no such sample"):
        list(pool.answers([0], prepare, lambda answer: answer, 1, door))
    assert door.over == [(0, False)] and set(asked(pool, 2)) == {0, 1}


def test_a_call_that_is_made_in_parts_is_continued_by_who_began_it():
    begun, parts = {}, {number: [] for number in range(4)}
    everyone = threading.Barrier(4)

    class Member(FakeMember):
        def call(self, message):
            if isinstance(message, int):
                everyone.wait(60)  # so that each begins one
            return super().call(message)

    def go_on(number, answer):
        parts[number].append(answer[1])
        begun.setdefault(number, answer[1])
        return f"more of {number}" if len(parts[number]) < 3 else None

    members: Any = [Member(pid) for pid in (1, 2, 3, 4)]
    pool = MemberPool(members, lambda member: None)
    found = dict(pool.answers(range(4), lambda number: number, lambda answer: answer, go_on=go_on))
    assert sorted(begun.values()) == [1, 2, 3, 4] and sorted(found) == [0, 1, 2, 3]
    assert parts == {number: [pid] * 3 for number, pid in begun.items()}


def test_a_call_whose_first_member_has_died_is_continued_by_another():
    members: Any = [FakeMember(1, {"more"}), FakeMember(2)]
    pool = MemberPool(members, lambda member: None)
    found = dict(
        pool.answers(
            [0], lambda _: "first", lambda answer: answer, go_on=lambda _, said: "more" if said[0] == "first" else None
        )
    )
    assert found[0][0] == "more" and members[0].asked[:2] == ["first", "more"]


class WaitingMember(FakeMember):
    """Answers when `may_go`, or "a part" when it is told "end"."""

    def __init__(self, pid):
        super().__init__(pid)
        self.may_go, self.is_asked, self.is_told = threading.Event(), threading.Event(), False

    def call(self, message):
        self.is_asked.set()
        assert self.may_go.wait(60)
        self.asked.append(message)
        return ("a part" if self.is_told else message), self.pid

    def post(self, message):
        assert message == "end"
        self.is_told = True
        self.may_go.set()


def test_members_that_rest_get_no_calls_and_others_continue_theirs():
    first, second = members = WaitingMember(1), WaitingMember(2)
    pool, found = pool_of(*members), {}

    def go_on(_, answer):
        return "the rest" if answer[0] == "a part" else None

    def ask():
        found.update(pool.answers(range(4), lambda number: f"call {number}", lambda answer: answer, go_on=go_on))

    asking = threading.Thread(target=ask)
    asking.start()
    assert first.is_asked.wait(60) and second.is_asked.wait(60)
    pool.rest([first], ["end"])
    assert first.asked == ["call 0"] and pool.working == (second,)
    second.may_go.set()
    asking.join(60)
    assert found[0] == ("the rest", 2) and first.asked == ["call 0"]
    assert [found[number][1] for number in range(4)] == [2, 2, 2, 2]
    pool.work([first])
    assert pool.working == members and dict(pool.answers([0], str, lambda answer: answer)) == {0: ("a part", 1)}


def test_a_member_that_is_to_rest_ends_its_call_first_where_nothing_cuts_it_short():
    member = WaitingMember(1)
    pool, found, order = pool_of(member, FakeMember(2)), {}, []
    asking = threading.Thread(target=lambda: found.update(pool.answers([0], str, lambda answer: answer)))
    asking.start()
    assert member.is_asked.wait(60)
    resting = threading.Thread(target=lambda: (pool.rest([member]), order.append("rests")))
    resting.start()
    order.append("may go")
    member.may_go.set()
    for thread in (asking, resting):
        thread.join(60)
    assert order == ["may go", "rests"] and found == {0: ("0", 1)}


def test_a_member_that_died_while_it_rested_is_replaced_when_it_works_again():
    restored: list[int] = []
    resting, other = FakeMember(1), FakeMember(2)
    pool = pool_of(resting, other, restore=lambda member: restored.append(member.pid))
    pool.rest([resting])
    resting.is_alive = False
    assert {pid for _, pid in asked(pool, 3).values()} == {2} and not restored
    pool.heal()
    assert not restored
    pool.work([resting])
    pool.heal()
    assert restored == [1] and resting.is_alive
