"""Properties of the composition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.reward.compose import composed, failed_groups
from unirl.reward.function import FunctionRewardScorer
from unirl.reward.service import RewardService
from unirl.types.media import Texts
from unirl.types.reward import RewardRequest, RewardResponse

numbers = st.floats(-1e6, 1e6, allow_nan=False, width=32)
few = settings(max_examples=50, deadline=None)


@st.composite
def columns(draw):
    num_samples = draw(st.integers(1, 6))
    names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True))
    rewards = {
        name: torch.tensor(draw(st.lists(numbers, min_size=num_samples, max_size=num_samples))) for name in names
    }
    weights = {name: draw(st.floats(0.125, 8)) for name in names}
    return rewards, weights


@few
@given(columns(), st.randoms(use_true_random=False), st.sampled_from(["weighted_sum", "weighted_mean"]))
def test_the_order_of_scorers_does_not_change_a_bit(case, random, aggregation):
    rewards, weights = case
    names = list(rewards)
    random.shuffle(names)
    shuffled = composed({name: rewards[name] for name in names}, {n: weights[n] for n in reversed(names)}, aggregation)
    assert torch.equal(shuffled, composed(rewards, weights, aggregation))


@few
@given(columns(), st.data())
def test_scoring_shards_and_joining_equals_scoring_the_whole(case, data):
    rewards, weights = case
    size = len(next(iter(rewards.values())))
    cut = data.draw(st.integers(0, size))
    parts = [{name: value[rows] for name, value in rewards.items()} for rows in (slice(0, cut), slice(cut, None))]
    joined = torch.cat([composed(part, weights) for part in parts])
    assert torch.equal(joined, composed(rewards, weights))


@few
@given(st.lists(numbers, min_size=2, max_size=8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_service_gives_each_sample_the_same_reward_whatever_the_shard_batch_and_order(values, batch_size, random):
    def request(rows):
        return RewardRequest(
            sample_ids=[f"s{row}" for row in rows],
            primitives={"text": Texts(texts=["p"] * len(rows))},
            generated={"text": Texts(texts=["t"] * len(rows))},
            metadata=[{"value": values[row]} for row in rows],
        )

    def scorer(factor, name):
        return FunctionRewardScorer(
            lambda texts, prompts, metadata: [factor * row["value"] for row in metadata],
            name=name,
            batch_size=batch_size,
        )

    rows = list(range(len(values)))
    service = RewardService([scorer(1.0, "a"), scorer(-0.5, "b")], weights={"a": 0.3, "b": 3.0})
    whole = service.score(request(rows)).rewards
    random.shuffle(rows)
    cut = len(rows) // 2
    joined = RewardResponse.concat([service.score(request(part)) for part in (rows[:cut], rows[cut:])])
    assert torch.equal(joined.rewards, whole[rows])


def test_a_weighted_sum_by_hand_and_nan_stays_nan():
    rewards = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([10.0, torch.nan])}
    total = composed(rewards, {"a": 2.0, "b": 0.5})
    assert total[0] == 7.0 and total[1].isnan() and total.dtype == torch.float32
    assert composed(rewards, {"a": 3.0, "b": 1.0}, "weighted_mean")[0] == 3.25


def test_failed_groups_are_named_once_in_order():
    assert failed_groups([True, False, False, True, False], ["x", "z", "z", "x", "y"]) == ["z", "y"]
