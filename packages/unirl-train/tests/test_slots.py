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
