"""Which samples are trained on: worked cases, and what never changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.algorithms.selection import SampleSelection, best_and_worst, zero_variance_groups
from unirl.types.errors import ConfigError

GROUPS = ["a", "a", "a", "a", "b", "b", "b", "b"]


def test_best_and_worst_by_hand():
    advantages = torch.tensor([0.5, -1.0, 2.0, 0.1, 0.0, 3.0, -2.0, 1.0])
    assert best_and_worst(advantages, GROUPS, 2) == [2, 1, 5, 6]
    assert best_and_worst(advantages, GROUPS, 4) == [2, 0, 3, 1, 5, 7, 4, 6]


def test_groups_that_teach_nothing_go_and_come_back_for_the_divisor():
    advantages = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, -1.0, 1.0, -1.0])
    select = SampleSelection(drop_zero_variance=True)
    assert select.rows(advantages, GROUPS, 1) == [4, 5, 6, 7]
    assert select.rows(advantages, GROUPS, 2) == [4, 5, 6, 7]
    assert select.rows(advantages, GROUPS, 3) == [0, 1, 4, 5, 6, 7]
    assert select.rows(torch.zeros(8), GROUPS, 2) is None  # nothing to learn: train on it as it is
    assert SampleSelection().rows(advantages, GROUPS, 3) is None


@given(st.lists(st.sampled_from([0.0, -1.0, 0.5, 2.0]), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8]))
def test_every_sample_with_an_advantage_is_kept_and_the_count_divides(values, divisor):
    rows = SampleSelection(drop_zero_variance=True).rows(torch.tensor(values), GROUPS, divisor)
    kept = list(range(8)) if rows is None else rows
    assert {i for i, value in enumerate(values) if value != 0} <= set(kept)
    assert len(kept) % divisor == 0
    assert kept == sorted(set(kept))


def test_zero_variance_groups_are_those_whose_rewards_are_equal():
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.2])
    assert zero_variance_groups(rewards, GROUPS) == {"a"}


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="best_of = 3 must be an even number"):
        SampleSelection(best_of=3)
    with pytest.raises(ConfigError, match="best_of_children = 5 must be an even number"):
        SampleSelection(best_of_children=5)
    with pytest.raises(ConfigError, match="best_of_children = 6, but group a has 4 .* lower best_of_children"):
        SampleSelection(best_of_children=6).child_rows(torch.zeros(8), GROUPS)
    with pytest.raises(ConfigError, match="Set one"):
        SampleSelection(dynamic_sampling=True, drop_zero_variance=True)
    with pytest.raises(ConfigError, match="group a has 4 samples"):
        best_and_worst(torch.zeros(8), GROUPS, 6)
