"""Generalised advantages against hand-worked numbers, the sum that defines them, and their limits. float64 throughout.

Legend: B samples, S steps.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.algorithms.gae import generalized_advantages
from unirl.types.errors import ConfigError, ContractError

REWARDS_B = torch.tensor([4.0, -1.0], dtype=torch.float64)
VALUES_BS = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -0.5]], dtype=torch.float64)


def test_three_steps_by_hand():
    advantages, returns = generalized_advantages(REWARDS_B[:1], VALUES_BS[:1], gamma=0.5, lam=0.5)
    # delta = (0.5 * 2 - 1, 0.5 * 3 - 2, 4 - 3) = (0, -0.5, 1); each later one counts a quarter.
    expected = torch.tensor([[-0.0625, -0.25, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=0)
    torch.testing.assert_close(returns, torch.tensor([[0.9375, 1.75, 4.0]], dtype=torch.float64), rtol=0, atol=0)


def test_without_discount_and_decay_the_advantage_is_what_the_reward_adds_to_the_value():
    advantages, returns = generalized_advantages(REWARDS_B, VALUES_BS, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, (REWARDS_B[:, None] - VALUES_BS).double())
    torch.testing.assert_close(returns, REWARDS_B[:, None].double().expand(2, 3))


def test_a_critic_of_zero_leaves_the_reward_itself():
    advantages, _ = generalized_advantages(REWARDS_B, torch.zeros(2, 3), gamma=1.0, lam=1.0)
    assert torch.equal(advantages, REWARDS_B[:, None].double().expand(2, 3))


def test_full_decay_is_the_temporal_difference():
    advantages, returns = generalized_advantages(REWARDS_B, VALUES_BS, gamma=0.9, lam=0.0)
    following = VALUES_BS[:, 1:]
    expected = torch.cat([0.9 * following - VALUES_BS[:, :2], (REWARDS_B - VALUES_BS[:, 2])[:, None]], dim=1)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, advantages + VALUES_BS)


def test_a_constant_value_gives_all_steps_one_advantage():
    advantages, _ = generalized_advantages(REWARDS_B, torch.full((2, 3), 0.25), gamma=1.0, lam=1.0)
    assert torch.equal(advantages, (REWARDS_B - 0.25)[:, None].double().expand(2, 3))


numbers = st.floats(-10, 10, width=32)


@given(st.lists(numbers, min_size=1, max_size=6), numbers, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_the_recursion_is_the_discounted_sum_of_later_differences(values, reward, gamma, lam):
    advantages, _ = generalized_advantages(
        torch.tensor([reward]), torch.tensor([values], dtype=torch.float64), gamma=gamma, lam=lam
    )
    following, rewards = [*values[1:], 0.0], [0.0] * (len(values) - 1) + [reward]
    deltas = [r + gamma * after - value for r, after, value in zip(rewards, following, values, strict=True)]
    expected = [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[s:])) for s in range(len(values))]
    torch.testing.assert_close(advantages[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_wrong_shapes_and_ranges_are_refused():
    with pytest.raises(ContractError, match=r"rewards \(3,\) must be \[B\] or \[B, S\] for values \(2, 3\)"):
        generalized_advantages(torch.zeros(3), VALUES_BS, gamma=1.0, lam=1.0)
    with pytest.raises(ConfigError, match=r"algorithm.gamma = 1.5"):
        generalized_advantages(REWARDS_B, VALUES_BS, gamma=1.5, lam=1.0)


def test_samples_of_unequal_length_equal_each_alone():
    lengths = torch.tensor([3, 1, 0, 2])
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    rewards = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    final = torch.randn(4, generator=generator, dtype=torch.float64)
    for given_rewards in (rewards, final):
        advantages, returns = generalized_advantages(given_rewards, values, gamma=0.9, lam=0.8, lengths_B=lengths)
        for row, length in enumerate(lengths.tolist()):
            alone = given_rewards[row : row + 1]
            if length == 0:
                assert torch.equal(advantages[row], torch.zeros(3, dtype=torch.float64))
                continue
            own = generalized_advantages(
                alone[:, :length] if alone.ndim == 2 else alone, values[row : row + 1, :length], gamma=0.9, lam=0.8
            )
            for mine, theirs in zip((advantages, returns), own, strict=True):
                torch.testing.assert_close(mine[row, :length], theirs[0], rtol=0, atol=0)
                assert torch.equal(mine[row, length:], torch.zeros(3 - length, dtype=torch.float64))


def test_a_reward_a_step_is_worth_what_it_adds_to_all_steps_before_it():
    rewards = torch.tensor([[1.0, -2.0, 4.0]], dtype=torch.float64)
    advantages, _ = generalized_advantages(rewards, torch.zeros(1, 3), gamma=0.5, lam=1.0)
    torch.testing.assert_close(advantages, torch.tensor([[1 - 1 + 1.0, -2 + 2.0, 4.0]], dtype=torch.float64))


def test_lengths_beyond_the_steps_are_refused():
    with pytest.raises(ContractError, match="lengths"):
        generalized_advantages(torch.zeros(1), torch.zeros(1, 2), gamma=1.0, lam=1.0, lengths_B=torch.tensor([3]))
