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
    with pytest.raises(ConfigError, match="10 samples a device do not divide into 3 updates"):
        mini_batches(10, 3)
