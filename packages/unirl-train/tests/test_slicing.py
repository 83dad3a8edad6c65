"""Mini-batches and micro-batches: every sample once, and the same sets at any number of devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.train.slicing import mini_batches, training_slices
from unirl.types.errors import ConfigError


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 9))
def test_every_sample_is_trained_once(num_updates, per_update, micro):
    slices = training_slices(num_updates * per_update, num_updates, micro)
    flat = [i for update in slices for part in update for i in part]
    assert sorted(flat) == list(range(num_updates * per_update))
    assert all(0 < len(part) <= micro for update in slices for part in update)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_mini_batches_do_not_depend_on_the_number_of_devices(num_updates, num_devices, per):
    shard = num_updates * per
    whole = [set(mini) for mini in mini_batches(shard * num_devices, num_updates)]
    for update in range(num_updates):
        union = {device * shard + i for device in range(num_devices) for i in mini_batches(shard, num_updates)[update]}
        assert union == whole[update]


def test_sizes_that_do_not_divide_are_named():
    with pytest.raises(ConfigError, match="10 samples per device, 1 to a unit, do not divide into 3 updates"):
        mini_batches(10, 3)


def test_samples_of_a_unit_stay_together_in_mini_and_micro_batches():
    assert training_slices(8, 2, 2, samples_per_unit=2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    with pytest.raises(ConfigError, match="must be a positive multiple of 2"):
        training_slices(8, 2, 3, samples_per_unit=2)


def test_units_of_shards_are_the_same_at_any_number_of_devices():
    whole = mini_batches(16, 2, samples_per_unit=2)
    shards = [[[8 * rank + i for i in mini] for mini in mini_batches(8, 2, samples_per_unit=2)] for rank in range(2)]
    assert [sorted(shards[0][u] + shards[1][u]) for u in range(2)] == whole
