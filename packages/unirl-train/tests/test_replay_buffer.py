"""The replay buffer: what it forgets, what it draws, and that it repeats itself."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.algorithms.replay_buffer import ReplayBuffer, ReplayEntry
from unirl.types.errors import ConfigError, ContractError

ORDERS = ["uniform", "recent", "advantage"]


def entry(key: str, version: int = 0, advantage: float = 1.0) -> ReplayEntry:
    return ReplayEntry(key, version, advantage)


ENTRIES = st.lists(
    st.builds(ReplayEntry, st.text("abcd", min_size=1, max_size=3), st.integers(0, 9), st.floats(-3, 3)), max_size=40
)
BUFFERS = st.fixed_dictionaries(
    {
        "capacity": st.integers(1, 12),
        "order": st.sampled_from(ORDERS),
        "max_staleness": st.none() | st.integers(0, 5),
        "seed": st.integers(0, 3),
    }
)


def keys(entries: list[ReplayEntry]) -> list[str]:
    return [each.key for each in entries]


# Properties ---------------------------------------------------------------------------------------------------------


@given(BUFFERS, ENTRIES, st.integers(0, 20), st.integers(9, 14))
def test_a_draw_has_no_duplicates_nothing_too_old_and_what_was_added_last(
    options: Any, entries: list[ReplayEntry], count: int, version: int
):
    buffer = ReplayBuffer(**options)
    buffer.add(entries)
    latest = {each.key: each for each in entries}
    for _ in range(3):
        drawn = buffer.draw(count, version=version)
        assert len(set(keys(drawn))) == len(drawn) <= count
        assert all(each == latest[each.key] for each in drawn)
        if options["max_staleness"] is not None:
            assert all(version - each.version <= options["max_staleness"] for each in drawn)
        if options["order"] == "advantage":
            assert all(each.advantage != 0 for each in drawn)
        reach = [
            e
            for e in buffer.entries
            if options["max_staleness"] is None or version - e.version <= options["max_staleness"]
        ]
        drawable = [e for e in reach if options["order"] != "advantage" or e.advantage != 0]
        assert len(drawn) == min(count, len(drawable))


@given(BUFFERS, st.lists(ENTRIES, max_size=4))
def test_it_never_holds_more_than_its_capacity_and_keeps_the_newest(options: Any, batches: list[list[ReplayEntry]]):
    buffer = ReplayBuffer(**options)
    for batch in batches:
        before = {each.key for each in buffer.entries} | {each.key for each in batch}
        gone = buffer.add(batch)
        kept = {each.key for each in buffer.entries}
        assert len(buffer) == len(kept) <= options["capacity"]
        assert kept.isdisjoint(gone) and kept | set(gone) == before
        latest = {each.key: each.version for each in batch}
        lost = [latest[key] for key in gone if key in latest]
        assert not lost or max(lost) <= min(each.version for each in buffer.entries)


@given(BUFFERS, ENTRIES, ENTRIES, st.integers(0, 5))
def test_a_restored_buffer_goes_on_as_the_saved_one(
    options: Any, first: list[ReplayEntry], second: list[ReplayEntry], num_draws: int
):
    saved = ReplayBuffer(**options)
    saved.add(first)
    for _ in range(num_draws):
        saved.draw(3, version=9)
    restored = ReplayBuffer(**options)
    restored.add([entry("something else")])
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert restored.entries == saved.entries
    for buffer in (saved, restored):
        buffer.add(second)
    assert [restored.draw(4, version=9) for _ in range(3)] == [saved.draw(4, version=9) for _ in range(3)]
    assert restored.state_dict() == saved.state_dict()


@given(ENTRIES, st.sampled_from(["uniform", "advantage"]), st.randoms())
def test_draws_do_not_depend_on_the_order_of_arrival(entries: list[ReplayEntry], order: Any, rng: random.Random):
    distinct = list({each.key: each for each in entries}.values())
    found = []
    for _ in range(2):
        buffer = ReplayBuffer(capacity=100, order=order, seed=1)
        buffer.add(distinct)
        found.append([buffer.draw(5, version=9) for _ in range(2)])
        rng.shuffle(distinct)
    assert found[0] == found[1]


# By hand ------------------------------------------------------------------------------------------------------------


def test_the_recent_are_the_newest_versions_and_of_those_the_last_added():
    buffer = ReplayBuffer(capacity=9, order="recent")
    buffer.add([entry("a", 3), entry("b", 5), entry("c", 5), entry("d", 4)])
    assert keys(buffer.draw(3, version=5)) == ["c", "b", "d"]
    assert buffer.draw(3, version=5) == buffer.draw(3, version=5)


def test_the_oldest_version_goes_first_even_if_it_came_last():
    buffer = ReplayBuffer(capacity=2)
    assert buffer.add([entry("a", 2), entry("b", 2), entry("late", 1)]) == ["late"]
    assert buffer.add([entry("c", 2)]) == ["a"]
    assert keys(buffer.entries) == ["b", "c"]


def test_what_is_too_old_is_not_drawn_and_may_be_forgotten():
    buffer = ReplayBuffer(capacity=9, max_staleness=2)
    buffer.add([entry("a", 3), entry("b", 4), entry("c", 6)])
    assert sorted(keys(buffer.draw(9, version=6))) == ["b", "c"]
    assert buffer.discard_older(6) == ["a"]
    assert buffer.discard(["b", "unknown"]) == ["b"]
    assert keys(buffer.entries) == ["c"]


def test_a_known_key_is_replaced():
    buffer = ReplayBuffer(capacity=2)
    buffer.add([entry("a", 1, 0.5), entry("b", 1), entry("a", 2, 0.7)])
    assert buffer.entries == [entry("b", 1), entry("a", 2, 0.7)]


def frequencies(order: Any, advantages: dict[str, float], count: int, num_draws: int = 4000) -> dict[str, float]:
    """How often each entry is in a draw."""
    buffer = ReplayBuffer(capacity=9, order=order, seed=5)
    buffer.add(entry(key, 0, advantage) for key, advantage in advantages.items())
    drawn = Counter(key for _ in range(num_draws) for key in keys(buffer.draw(count, version=0)))
    return {key: drawn[key] / num_draws for key in advantages}


def within_four_errors(found: float, expected: float, num_draws: int = 4000) -> bool:
    return abs(found - expected) <= 4 * math.sqrt(max(expected * (1 - expected), 1e-9) / num_draws)


def test_uniform_draws_take_each_equally_often():
    found = frequencies("uniform", {"a": 5.0, "b": 0.0, "c": -1.0, "d": 1.0, "e": 1.0}, 2)
    assert all(within_four_errors(each, 2 / 5) for each in found.values())


def test_draws_by_advantage_take_the_first_in_proportion_and_the_second_among_the_rest():
    weights = {"a": 3.0, "b": 2.0, "c": -1.0, "never": 0.0}
    first = frequencies("advantage", weights, 1)
    assert all(within_four_errors(first[key], abs(weight) / 6) for key, weight in weights.items())
    both = frequencies("advantage", weights, 2)
    for key, weight in weights.items():
        others = [abs(each) for other, each in weights.items() if other != key]
        expected = abs(weight) / 6 + sum(each / 6 * abs(weight) / (6 - each) for each in others)
        assert within_four_errors(both[key], expected)


def test_other_seeds_and_later_draws_are_other_draws():
    def draws(seed: int) -> list[list[str]]:
        buffer = ReplayBuffer(capacity=50, seed=seed)
        buffer.add(entry(str(i)) for i in range(50))
        return [keys(buffer.draw(10, version=0)) for _ in range(3)]

    assert draws(0) == draws(0)
    assert len({tuple(drawn) for drawn in draws(0) + draws(1)}) == 6


def test_wrong_values_are_refused():
    with pytest.raises(ConfigError, match="capacity = 0"):
        ReplayBuffer(capacity=0)
    with pytest.raises(ConfigError, match="order = 'best'"):
        ReplayBuffer(capacity=1, order="best")  # ty: ignore[invalid-argument-type]
    with pytest.raises(ContractError, match="the advantage of 'a' is nan"):
        ReplayBuffer(capacity=1).add([entry("a", 0, math.nan)])
    with pytest.raises(ContractError, match="-1 entries cannot be drawn"):
        ReplayBuffer(capacity=1).draw(-1, version=0)
