"""Samples dealt to devices by their cost: what must not change, how even it gets, and the trainer that does it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.train.slicing import mini_batches, training_slices
from unirl.trainer.balance import balanced_order
from unirl.types.errors import ConfigError


@st.composite
def batches(draw):
    """(costs, devices, updates, samples a unit)."""
    ranks, updates, unit = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    count = ranks * updates * unit * draw(st.integers(1, 6))
    return draw(st.lists(st.integers(1, 300), min_size=count, max_size=count)), ranks, updates, unit


def shards(order, ranks):
    size = len(order) // ranks
    return [order[rank * size : (rank + 1) * size] for rank in range(ranks)]


@given(batches())
def test_every_sample_stays_in_its_update_with_its_unit(batch):
    costs, ranks, updates, unit = batch
    order = balanced_order(costs, ranks, updates, unit)
    assert sorted(order) == list(range(len(costs)))
    assert [index % unit for index in order] == list(range(unit)) * (len(order) // unit)
    whole = mini_batches(len(costs), updates, unit)
    for update in range(updates):
        got = [shard[i] for shard in shards(order, ranks) for i in mini_batches(len(shard), updates, unit)[update]]
        assert sorted(got) == sorted(whole[update])


@given(batches())
def test_devices_differ_by_no_more_than_neighbours_in_the_sorted_costs(batch):
    costs, ranks, updates, unit = batch
    order = balanced_order(costs, ranks, updates, unit)
    sums = [sum(costs[start : start + unit]) for start in range(0, len(costs), unit)]
    for update in range(updates):
        ranked = sorted(sums[update::updates])
        bound = max(max(ranked[i : i + ranks]) - min(ranked[i : i + ranks]) for i in range(0, len(ranked), ranks))
        loads = [
            sum(costs[shard[i]] for i in mini_batches(len(shard), updates, unit)[update])
            for shard in shards(order, ranks)
        ]
        assert max(loads) - min(loads) <= bound


@given(batches())
def test_the_order_is_the_same_each_time_and_that_of_the_batch_on_one_device(batch):
    costs, ranks, updates, unit = batch
    assert balanced_order(costs, ranks, updates, unit) == balanced_order(list(costs), ranks, updates, unit)
    assert balanced_order(costs, 1, updates, unit) == list(range(len(costs)))


def test_a_long_tail_is_spread_over_devices_and_micro_batches():
    generator = torch.Generator().manual_seed(0)
    costs = torch.exp(0.7 * torch.randn(512, generator=generator) + 5).long().clamp(max=1024).tolist()
    order = balanced_order(costs, 4, 2)
    slices = training_slices(128, 2, 16)

    def waiting(shards_of):
        """What the slowest device does over the mean, summed over micro-batches, which all devices begin together."""
        work = [[[sum(costs[shard[i]] for i in micro) for shard in shards_of] for micro in mini] for mini in slices]
        return sum(max(each) for mini in work for each in mini) * 4 / sum(sum(each) for mini in work for each in mini)

    before, after = waiting(shards(list(range(512)), 4)), waiting(shards(order, 4))
    assert before > 1.2 and after < 1.06


def test_samples_that_do_not_divide_are_named():
    with pytest.raises(ConfigError, match="12 samples, 1 to a unit, do not divide over 4 devices x 2 updates"):
        balanced_order([1] * 12, 4, 2)
