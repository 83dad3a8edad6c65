"""Advantages against hand-worked numbers, against each convention's closed form, and their invariances."""

import itertools
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trl_reference import trl_advantages

from unirl.algorithms.advantages import PRESETS, AdvantageConfig, group_metrics, normalized_advantages
from unirl.algorithms.schedules import LinearWeight
from unirl.types.errors import ConfigError, ContractError

REWARDS = torch.tensor([1.0, 3.0, 2.0, 6.0])
GROUPS = ["a", "a", "b", "b"]


def test_population_group_convention_by_hand():
    got = AdvantageConfig(preset="flow_grpo")(REWARDS, GROUPS)
    expected = torch.tensor([-1 / (1 + 1e-4), 1 / (1 + 1e-4), -2 / (2 + 1e-4), 2 / (2 + 1e-4)])
    torch.testing.assert_close(got, expected)


def test_sample_group_convention_by_hand():
    got = AdvantageConfig(preset="dance_grpo")(REWARDS, GROUPS)
    s = math.sqrt(2.0)
    torch.testing.assert_close(got, torch.tensor([-1 / s, 1 / s, -2 / (2 * s), 2 / (2 * s)]))


def test_eps_stands_inside_the_root_in_the_unirl_convention():
    got = AdvantageConfig(preset="unirl", eps=3.0)(REWARDS, GROUPS)
    torch.testing.assert_close(got[:2], torch.tensor([-0.5, 0.5]))  # 1 / sqrt(1 + 3)


def test_global_std_divides_by_the_spread_of_the_whole_batch():
    got = AdvantageConfig(preset="flow_grpo_global_std")(REWARDS, GROUPS)
    std = float(REWARDS.double().std(unbiased=False))
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0, -2.0, 2.0]) / (std + 1e-4))


def test_ddof_one_against_zero_scales_groups_of_four_by_root_three_quarters():
    rewards, groups = torch.tensor([1.0, 2.0, 3.0, 4.0]), ["g"] * 4
    ratio = AdvantageConfig(preset="dance_grpo", eps=0.0)(rewards, groups) / AdvantageConfig(
        preset="flow_grpo", eps=0.0
    )(rewards, groups)
    torch.testing.assert_close(ratio, torch.full((4,), math.sqrt(3 / 4)))


def test_leave_one_out_compares_each_sample_with_the_mean_of_the_others():
    rewards, groups = torch.tensor([1.0, 3.0, 8.0, 2.0, 6.0]), ["a", "a", "a", "b", "b"]
    got = AdvantageConfig(preset="rloo")(rewards, groups)
    torch.testing.assert_close(got, torch.tensor([1 - 5.5, 3 - 4.5, 8 - 2.0, -4.0, 4.0]))


def test_whitening_over_samples_with_and_without_a_group_baseline():
    rewards = REWARDS.double()
    plain = AdvantageConfig(preset="batch_whitened")(REWARDS, GROUPS)
    torch.testing.assert_close(
        plain.double(), (rewards - 3) / (rewards.var(correction=0) + 1e-8).sqrt(), rtol=1e-6, atol=0
    )
    with_baseline = AdvantageConfig(preset="group_centred_batch_whitened")(REWARDS, GROUPS)
    left = torch.tensor([-1.0, 1.0, -2.0, 2.0], dtype=torch.float64)  # the group means are 2 and 4
    torch.testing.assert_close(with_baseline.double(), left / (2.5 + 1e-8) ** 0.5, rtol=1e-6, atol=0)


def whitened_token_matrix(returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """REINFORCE++ as published: each token's return, less the mean, over the unbiased deviation of all tokens."""
    drawn = returns_BT[mask_BT]
    return (returns_BT - drawn.mean()) / (drawn.var(correction=1) + 1e-8).sqrt() * mask_BT


@given(st.lists(st.tuples(st.floats(-3, 3, width=32), st.integers(0, 9)), min_size=6, max_size=6), st.booleans())
def test_reinforce_plus_plus_counts_tokens_as_the_published_code_does(samples, has_baseline):
    """Ragged lengths: against a padded matrix of the returns of all tokens."""
    rewards = torch.tensor([reward for reward, _ in samples], dtype=torch.float64)
    lengths = torch.tensor([length for _, length in samples])
    groups = ["a", "a", "a", "b", "b", "b"]
    values = rewards
    if has_baseline:
        values = rewards - rewards.view(2, 3).mean(dim=1).repeat_interleave(3)
    mask = torch.arange(9) < lengths[:, None]
    if len(set(values[lengths > 0].tolist())) < 2 or float(values[lengths > 0].std()) < 1e-2:
        return
    expected = whitened_token_matrix(values[:, None].expand(6, 9), mask)
    preset = "reinforce_pp_baseline" if has_baseline else "reinforce_pp"
    found = AdvantageConfig(preset=preset)(rewards, groups, num_tokens_B=lengths)
    torch.testing.assert_close((found[:, None] * mask).double(), expected, rtol=1e-5, atol=1e-5)
    assert abs(float((found.double() * lengths).sum())) < 1e-4


def test_statistics_over_tokens_need_the_tokens_and_the_whitening():
    with pytest.raises(ContractError, match="number of tokens of each of 4 samples"):
        AdvantageConfig(preset="reinforce_pp")(REWARDS, GROUPS)
    with pytest.raises(ConfigError, match="preset: reinforce_pp"):
        AdvantageConfig(preset="flow_grpo", statistics="tokens")
    with pytest.raises(ConfigError, match="preset: reinforce_pp"):
        AdvantageConfig(preset="reinforce_pp", leave_one_out=True)
    equal = AdvantageConfig(preset="reinforce_pp")(
        torch.full((4,), 0.1), GROUPS, num_tokens_B=torch.tensor([1, 2, 3, 4])
    )
    assert torch.equal(equal, torch.zeros(4))


def test_dapo_divides_by_the_sample_deviation_of_the_group():
    got = AdvantageConfig(preset="dapo")(REWARDS, GROUPS)
    s = math.sqrt(2.0)
    expected = torch.tensor([-1 / (s + 1e-6), 1 / (s + 1e-6), -2 / (2 * s + 1e-6), 2 / (2 * s + 1e-6)])
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("preset", sorted(name for name in PRESETS if PRESETS[name]["center"] == "group"))
def test_a_group_without_spread_gets_exactly_zero(preset):
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 0.1, 5.0, 1.0]), ["a"] * 4 + ["b"] * 2
    got = AdvantageConfig(preset=preset)(rewards, groups, num_tokens_B=torch.full((6,), 3))
    assert torch.equal(got[:4], torch.zeros(4))
    assert torch.isfinite(got).all()


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=6, max_size=6),
    st.permutations(range(6)),
    st.floats(0.5, 4.0),
    st.floats(-3.0, 3.0),
)
@settings(max_examples=60, deadline=None)
def test_advantages_ignore_order_and_affine_changes_of_the_reward(values, order, slope, offset):
    rewards, groups = torch.tensor(values, dtype=torch.float64), ["a", "a", "a", "b", "b", "b"]
    options: dict[str, Any] = {"center": "group", "scale": "group", "ddof": 0, "eps": 0.0}
    base = normalized_advantages(rewards, groups, **options)
    if not torch.isfinite(base).all() or min(rewards[:3].std(), rewards[3:].std()) < 1e-2:
        return
    shuffled = normalized_advantages(rewards[list(order)], [groups[i] for i in order], **options)
    torch.testing.assert_close(shuffled, base[list(order)], atol=1e-5, rtol=1e-5)
    affine = normalized_advantages(slope * rewards + offset, groups, **options)
    torch.testing.assert_close(affine, base, atol=1e-4, rtol=1e-4)


def test_normalise_then_sum_gives_each_component_the_same_say():
    components = {"small": torch.tensor([0.0, 0.01]), "large": torch.tensor([100.0, 0.0])}
    total = components["small"] + components["large"]
    config = AdvantageConfig(preset="flow_grpo", eps=0.0, multi_reward="normalize_then_sum")
    torch.testing.assert_close(config(total, ["g", "g"], components), torch.zeros(2))
    weighted = AdvantageConfig(
        preset="flow_grpo", eps=0.0, multi_reward="normalize_then_sum", component_weights={"small": 3.0}
    )
    torch.testing.assert_close(weighted(total, ["g", "g"], components), torch.tensor([-2.0, 2.0]))


@pytest.mark.parametrize(
    ("multi_reward", "aggregation"), [("gdpo", "normalize_then_sum"), ("weighted_sum", "sum_then_normalize")]
)
def test_several_rewards_get_the_advantages_of_trl(multi_reward, aggregation):
    rewards = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double() * torch.tensor([1.0, 30.0, 0.1])
    rewards[4:8, 1] = 2.0  # a component without spread in one group
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    named = dict(zip("abc", weights.tolist(), strict=True))
    config = AdvantageConfig(
        preset="trl", multi_reward=multi_reward, component_weights=named if multi_reward == "gdpo" else None
    )
    components = dict(zip("abc", rewards.unbind(1), strict=True))
    found = config((rewards * weights).sum(1), [f"g{i // 4}" for i in range(12)], components)
    expected = trl_advantages(rewards, weights, num_generations=4, aggregation=aggregation)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)  # components are rounded to float32


def test_gdpo_is_the_sum_of_normalised_components_normalised_over_the_batch():
    # z: a (-1, 1 | -1, 1), b (1, -1 | -1, 1); their sum (0, 0 | -2, 2) has mean 0 and population deviation sqrt(2).
    components = {"a": torch.tensor([0.0, 1.0, 5.0, 7.0]), "b": torch.tensor([10.0, 0.0, 3.0, 4.0])}
    total, groups = components["a"] + components["b"], ["g", "g", "h", "h"]
    config = AdvantageConfig(preset="flow_grpo", eps=0.0, multi_reward="gdpo")
    torch.testing.assert_close(config(total, groups, components), torch.tensor([0.0, 0.0, -1.0, 1.0]) * math.sqrt(2))


def test_gdpo_gives_a_group_that_no_component_tells_apart_exactly_zero():
    flat = [0.1, 0.1, 0.1]
    components = {"a": torch.tensor([*flat, 0.3, 1.7, 0.9]), "b": torch.tensor([*flat, 5.1, 0.2, 0.7])}
    config = AdvantageConfig(preset="flow_grpo", multi_reward="gdpo")
    found = config(torch.zeros(6), list("aaabbb"), components)
    assert torch.equal(found[:3], torch.zeros(3)) and (found[3:] != 0).all()
    silent = config(torch.zeros(3), ["a"] * 3, {"a": torch.tensor(flat)})
    assert torch.equal(silent, torch.zeros(3))


def test_an_unknown_way_to_add_rewards_up_is_refused():
    with pytest.raises(
        ConfigError, match="multi_reward = 'gdppo' must be one of weighted_sum, normalize_then_sum, gdpo"
    ):
        AdvantageConfig(multi_reward=cast(Any, "gdppo"))


def scheduled() -> AdvantageConfig:
    return AdvantageConfig(
        preset="flow_grpo",
        eps=0.0,
        multi_reward="normalize_then_sum",
        component_weights={"a": LinearWeight(0.0, 2.0), "b": 0.5},
    )


def test_a_component_counts_as_its_schedule_says():
    components = {"a": torch.tensor([0.0, 2.0]), "b": torch.tensor([3.0, 1.0])}  # z: (-1, 1) and (1, -1)
    total = components["a"] + components["b"]
    for progress, weight in ((0.0, 0.0), (0.25, 0.5), (1.0, 2.0)):
        got = scheduled()(total, ["g", "g"], components, progress=progress)
        torch.testing.assert_close(got, torch.tensor([-weight + 0.5, weight - 0.5]))
        assert scheduled().metrics(progress) == {"advantage/weight/a": weight}
    assert AdvantageConfig().metrics(0.5) == {}


@given(st.permutations(range(6)), st.floats(0.0, 1.0), st.floats(0.5, 4.0), st.floats(-3.0, 3.0))
@settings(max_examples=30, deadline=None)
def test_scheduled_sums_ignore_order_and_affine_changes_of_any_component(order, progress, slope, offset):
    groups = ["a", "a", "a", "b", "b", "b"]
    components = {"a": torch.tensor([0.0, 1.0, 5.0, 2.0, 2.5, 4.0]), "b": torch.tensor([3.0, 1.0, 1.5, 0.0, 9.0, 4.0])}
    base = scheduled()(torch.zeros(6), groups, components, progress=progress)
    rows = list(order)
    changed = {"a": (slope * components["a"] + offset)[rows], "b": components["b"][rows]}
    got = scheduled()(torch.zeros(6), [groups[i] for i in rows], changed, progress=progress)
    torch.testing.assert_close(got, base[rows], atol=1e-4, rtol=1e-4)


def test_a_weight_that_is_neither_number_nor_schedule_is_refused():
    weights: Any = {"a": {"start": 0.0, "end": 1.0}}
    with pytest.raises(ConfigError, match="must be a number or a mapping with _target_"):
        AdvantageConfig(multi_reward="normalize_then_sum", component_weights=weights)


def test_clip_limits_the_advantage():
    got = AdvantageConfig(preset="flow_grpo", clip=0.5)(REWARDS, GROUPS)
    assert float(got.abs().max()) == 0.5


def test_a_non_finite_reward_is_named():
    with pytest.raises(ContractError, match=r"samples \[1\] are not finite"):
        AdvantageConfig()(torch.tensor([1.0, float("nan")]), ["a", "a"])


def test_unknown_preset_and_useless_weights_are_refused():
    with pytest.raises(ConfigError, match="must be one of"):
        AdvantageConfig(preset="flowgrpo")
    with pytest.raises(ConfigError, match="does nothing with multi_reward"):
        AdvantageConfig(component_weights={"a": 1.0})


def test_group_metrics_count_groups_that_teach_nothing():
    metrics = group_metrics(torch.tensor([1.0, 1.0, 0.0, 2.0]), ["a", "a", "b", "b"])
    assert metrics == {"group/count": 2.0, "group/zero_std_ratio": 0.5, "group/std_mean": 0.5}


def test_maxrl_follows_the_likelihood_of_success_to_the_order_of_the_group():
    """The expected gradient over all outcomes of a group of N is that of sum_{k < N} -(1 - p)^k / k, which is log p cut
    off: what the paper maximises, since groups without a success teach nothing."""
    p, size = 0.3, 5
    score = torch.tensor([1 / p, -1 / (1 - p)], dtype=torch.float64)  # d log of the outcome's probability / dp
    total = 0.0
    for outcome in itertools.product((1.0, 0.0), repeat=size):
        rewards = torch.tensor(outcome)
        advantages = AdvantageConfig(preset="maxrl")(rewards, ["g"] * size).double()
        probability = p ** sum(outcome) * (1 - p) ** (size - sum(outcome))
        total += probability * float((advantages * score[(1 - rewards).long()]).mean())
    assert total == pytest.approx(sum((1 - p) ** k for k in range(size - 1)), rel=1e-6)


def test_maxrl_of_one_success_among_four_and_of_none():
    found = AdvantageConfig(preset="maxrl")(torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]), ["a"] * 4 + ["b"] * 4)
    assert found.tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match=r"needs rewards of at least 0, the least is -1. Set reward.weights"):
        AdvantageConfig(preset="maxrl")(torch.tensor([1.0, -1.0]), ["a"] * 2)
    with pytest.raises(ConfigError, match="divides by the mean of groups. Set center: group, not batch"):
        AdvantageConfig(preset="maxrl", center="batch", eps=1e-6)(torch.tensor([1.0, 0.0]), ["a"] * 2)


# Trimmed statistics -----------------------------------------------------------------------------------------------


def test_trimmed_mean_and_deviation_of_a_group_worked_by_hand():
    """Without 0 and 100 the group 0 2 4 100 has mean 3 and population deviation 1."""
    found = AdvantageConfig(preset="flow_grpo", eps=0.0, trim=1)(torch.tensor([2.0, 100, 0, 4]), ["g"] * 4)
    assert found.tolist() == [-1.0, 97.0, -3.0, 1.0]


@given(st.integers(0, 2), st.sampled_from([0, 1]), st.integers(0, 1000))
def test_trimmed_statistics_equal_those_of_loops(trim, ddof, seed):
    draw = np.random.default_rng(seed)
    names, values = [], []
    for group in range(3):
        size = int(draw.integers(6, 9))
        names += [f"g{group}"] * size
        values += list(draw.normal(size=size).astype(np.float32))
    order = draw.permutation(len(names))
    names, rewards = [names[i] for i in order], np.array(values)[order]
    found = AdvantageConfig(preset="flow_grpo", ddof=ddof, trim=trim)(torch.tensor(rewards), names)
    for name in set(names):
        rows = [i for i, own in enumerate(names) if own == name]
        kept = np.sort(rewards[rows].astype(np.float64))[trim : len(rows) - trim]
        expected = (rewards[rows] - kept.mean()) / (kept.std(ddof=ddof) + 1e-4)
        np.testing.assert_allclose(found[rows].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_one_that_stands_out_of_equals_is_not_divided_by_nothing():
    """Without the extremes of 0 0 0 1 nothing is left to divide by: the deviation of all four is sqrt(3) / 4."""
    found = AdvantageConfig(preset="flow_grpo", eps=0.0, trim=1)(torch.tensor([0.0, 0, 0, 1]), ["g"] * 4)
    assert found.tolist() == pytest.approx([0, 0, 0, 4 / 3**0.5])


def test_a_trim_that_leaves_nothing_or_has_no_group_is_refused():
    with pytest.raises(ConfigError, match="advantages.trim = 2 leaves nothing of a group of 4 samples"):
        AdvantageConfig(trim=2)(torch.arange(4.0), ["g"] * 4)
    for preset in ("batch_whitened", "maxrl", "rloo", "reinforce_pp"):
        with pytest.raises(ConfigError, match="leaves extremes out of a group's mean and deviation"):
            AdvantageConfig(trim=1, preset=preset)
