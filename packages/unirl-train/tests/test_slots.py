"""Slots of requests in flight: nothing is trained on that is too old, nothing is lost, nothing is trained on twice."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.trainer.loops.slots import Slots
from unirl.types.errors import ContractError

ROLLOUTS = 12


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 2**16))
def test_whatever_the_order_of_events_every_request_is_trained_on_once_and_none_is_too_old(
    per_rollout, max_staleness, first, seed
):
    draw = random.Random(seed)
    slots = Slots[int](per_rollout, max_staleness)
    slots.start(first)
    running, trained, largest = [], [], 0
    version = first
    while version < first + ROLLOUTS:
        event = draw.choice(["admit", "finish", "train"])
        if event == "admit" and (slot := slots.admit(until=first + ROLLOUTS)) is not None:
            assert slot.version == version
            running.append(slot)
        elif event == "finish" and running:
            slot = running.pop(draw.randrange(len(running)))
            slot.item = slot.number
        elif event == "train" and (oldest := slots.oldest()) is not None:
            assert all(0 <= version - slot.version <= max_staleness for slot in oldest)
            largest = max(largest, *(version - slot.version for slot in oldest))
            trained += [slot.item for slot in oldest]
            slots.free()
            version += 1
        assert len(slots._slots) <= slots.capacity == (max_staleness + 1) * per_rollout
    assert trained == list(range(first * per_rollout, (first + ROLLOUTS) * per_rollout))
    assert slots.admit(until=first + ROLLOUTS) is None and largest <= max_staleness


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 2**16),
    st.sampled_from(["wait", "drop", "correct"]),
)
def test_with_a_window_every_request_is_trained_on_once_none_is_too_old_and_a_resumed_run_has_the_others(
    per_rollout, max_staleness, window, seed, too_old
):
    draw, window = random.Random(seed), min(window, per_rollout)
    too_old = "wait" if window == 1 else too_old
    slots = Slots[int](per_rollout, max_staleness, window, too_old)
    slots.start(0)
    running, trained, overtaken = [], [], 0
    while slots.version < ROLLOUTS:
        event = draw.choice(
            ["admit", "finish", "train", "resume"] if draw.random() < 0.05 else ["admit", "finish", "train"]
        )
        if event == "admit" and (slot := slots.admit(until=ROLLOUTS)) is not None:
            assert slot.version == slots.version
            running.append(slot)
        elif event == "finish" and running:
            slot = running.pop(draw.randrange(len(running)))
            is_dropped = slot.is_dropped
            assert (slots.finish(slot, slot.number) is None) == is_dropped and not (is_dropped and too_old != "drop")
        elif event == "train" and (batch := slots.oldest()) is not None:
            assert len(batch) == per_rollout and batch == sorted(batch, key=lambda slot: slot.number)
            ages = [slots.version - slot.version for slot in batch]
            assert min(ages) >= 0 and (too_old == "correct" or max(ages) <= max_staleness)
            late = slots.take_too_old()
            assert late["schedule/too_old/corrected"] == sum(age > max_staleness for age in ages)
            oldest = min(slot.number for slot in slots._slots)
            assert batch[-1].number - oldest < (ROLLOUTS if window > 1 else 1) * per_rollout
            overtaken += slots.num_overtaken
            trained += [slot.item for slot in batch]
            slots.free()
        elif event == "resume":
            version, done = slots.version, set(trained)
            oldest = min(set(range(ROLLOUTS * per_rollout)) - done, default=ROLLOUTS * per_rollout)
            slots, running = Slots[int](per_rollout, max_staleness, window, too_old), []
            slots.start(version, first=oldest, ahead=[number for number in done if number > oldest])
    assert sorted(trained) == list(range(ROLLOUTS * per_rollout))
    assert slots.admit(until=ROLLOUTS) is None
    if window == 1:
        assert trained == sorted(trained) and not overtaken


def test_a_slow_request_is_overtaken_until_it_would_be_too_old():
    slots = Slots[str](2, 2, 2)
    admitted = [slots.admit(until=9) for _ in range(6)]
    assert all(admitted)
    for slot in slots._slots[1:]:
        slot.item = "a"
    assert numbers(slots) == [1, 2] and slots.num_overtaken == 1
    slots.free()
    assert numbers(slots) == [3, 4] and slots.num_overtaken == 1
    slots.free()
    assert slots.oldest() is None, "the next rollout would be three versions after it began"
    slots._slots[0].item = "a"
    assert numbers(slots) == [0, 5] and slots.num_overtaken == 0
    with pytest.raises(ContractError, match="a window of 3"):
        Slots(2, 1, 3)
    with pytest.raises(ContractError, match="too_old = drop with a window of 1"):
        Slots(2, 1, 1, "drop")


def one_slow_request(too_old):
    """Slots whose first request is not finished when it would be too old for the next rollout; four are trained on."""
    slots = Slots[str](2, 2, 2, too_old)
    admitted = [slots.admit(until=9) for _ in range(6)]
    for slot in admitted[1:]:
        assert slot is not None
        slot.item = "a"
    for expected in ([1, 2], [3, 4]):
        assert numbers(slots) == expected
        slots.free()
    return slots, admitted[0]


def test_a_request_that_is_too_old_is_waited_for():
    slots, _ = one_slow_request("wait")
    slots.admit(until=9).item = "a"
    assert slots.oldest() is None
    assert slots.take_too_old()["schedule/too_old/waited"] == 1


def test_a_request_that_is_too_old_is_dropped_and_asked_again():
    slots, slow = one_slow_request("drop")
    slots.admit(until=9).item = "a"
    assert numbers(slots) == [5, 6] and slow.is_dropped
    assert slots.take_too_old()["schedule/too_old/dropped"] == 1
    slots.free()
    assert slots.finish(slow, "old") is None and slow.item is None
    again = slots.admit(until=9)
    assert again is slow and (again.number, again.version, again.is_dropped) == (0, 3, False)
    slots.admit(until=9).item = "a"
    slots.finish(again, "new")
    assert numbers(slots) == [0, 7]


def test_a_request_that_is_too_old_is_trained_on_when_it_is_finished():
    slots, slow = one_slow_request("correct")
    slots.admit(until=9).item = "a"
    assert numbers(slots) == [5, 6]
    slots.free()
    assert slots.finish(slow, "old") == "old"
    slots.admit(until=9).item = "a"
    assert numbers(slots) == [0, 7] and slots.version - slow.version == 3
    assert slots.take_too_old()["schedule/too_old/corrected"] == 1


def numbers(slots):
    found = slots.oldest()
    return None if found is None else [slot.number for slot in found]


def test_without_staleness_a_rollout_is_admitted_when_the_one_before_is_trained_on():
    slots = Slots[str](2, 0)
    first, second = slots.admit(until=9), slots.admit(until=9)
    assert first is not None and second is not None and slots.admit(until=9) is None
    first.item = "a"
    assert slots.oldest() is None and slots.num_waiting == 1
    second.item = "b"
    assert slots.oldest() == [first, second] and slots.admit(until=9) is None
    slots.free()
    third = slots.admit(until=9)
    assert third is not None and (third.number, third.version) == (2, 1)
    assert slots.clear() == [] and slots.admit(until=9) is not None


def test_what_would_be_too_old_is_not_handed_out():
    slots = Slots[str](1, 1)
    slot = slots.admit(until=9)
    assert slot is not None
    slot.item, slots.version = "a", 2  # two pushes that returned no slot
    with pytest.raises(ContractError, match="began at version 0 and would be trained on at 2, more than 1 later"):
        slots.oldest()
    with pytest.raises(ContractError, match="0 requests per rollout"):
        Slots(0, 1)
