"""Comparisons of two samples, and what they say of each."""

import itertools
import math
import random

import pytest
import torch
from torch.nn.functional import logsigmoid

from unirl.reward.comparisons import bradley_terry, pairs_to_compare, win_rates
from unirl.reward.pairwise import PairwiseFunctionScorer
from unirl.types.errors import ConfigError, ContractError, RewardError

from .test_groupwise import GROUPS, request_of


def brighter(first, second, prompts, metadata):
    """True where the first image is the brighter one."""
    return first.mean((1, 2, 3)) > second.mean((1, 2, 3))


def logistic(first, second, prompts, metadata, sharpness=1.0):
    return (sharpness * (first.mean((1, 2, 3)) - second.mean((1, 2, 3)))).sigmoid()


@pytest.mark.parametrize("num_samples", range(2, 10))
@pytest.mark.parametrize("opponents", [None, 2, 4, 6])
def test_every_sample_is_compared_equally_often(num_samples, opponents):
    pairs = pairs_to_compare(num_samples, opponents)
    per_sample = num_samples - 1 if opponents is None else min(opponents, num_samples - 1)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == num_samples * per_sample / 2
    for row in range(num_samples):
        first = sum(row == pair[0] for pair in pairs)
        assert sum(row in pair for pair in pairs) == per_sample
        assert abs(first - per_sample / 2) <= 1


def test_win_rates_by_hand():
    # 0 beats 1 and 2; 1 beats 2 with probability 0.75; 3 is in no comparison.
    found = win_rates(4, [(0, 1), (2, 0), (1, 2)], [1.0, 0.0, 0.75])
    assert found[:3] == [1.0, 0.375, 0.125]
    assert math.isnan(found[3])


def test_two_strengths_are_the_log_odds():
    first, second = bradley_terry(2, [(0, 1)], [0.75], prior=1e-9)
    assert first - second == pytest.approx(math.log(3), abs=1e-6)


def test_strengths_of_a_model_are_found_again():
    strengths = torch.tensor([1.5, -0.5, 0.25, -1.25], dtype=torch.float64)
    pairs = list(itertools.permutations(range(4), 2))
    wins = [float((strengths[i] - strengths[j]).sigmoid()) for i, j in pairs]
    assert bradley_terry(4, pairs, wins, prior=1e-9) == pytest.approx(strengths.tolist(), abs=1e-6)


def test_strengths_maximise_the_penalised_likelihood():
    # It is strictly concave, so that a slope of 0 is its only maximum; autograd knows the slope.
    random.seed(0)
    pairs = pairs_to_compare(8, 4)
    wins_p = torch.tensor([random.choice([0.0, 1.0, 0.5]) for _ in pairs], dtype=torch.float64)
    s = torch.tensor(bradley_terry(8, pairs, wins_p.tolist(), prior=0.1), dtype=torch.float64, requires_grad=True)
    i, j = torch.tensor(pairs).T
    margins = s[i] - s[j]
    likelihood = wins_p * logsigmoid(margins) + (1 - wins_p) * logsigmoid(-margins)
    (slope,) = torch.autograd.grad(likelihood.sum() - 0.05 * s.square().sum(), s)
    assert slope.abs().max() < 1e-9


def test_one_who_wins_everything_has_a_finite_strength():
    found = bradley_terry(3, pairs_to_compare(3, None), [1.0, 1.0, 1.0])
    assert all(map(math.isfinite, found))


@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize("groups", [GROUPS, ["a", "b", "c"] * 3])
def test_the_win_rate_orders_each_group(batch_size, groups):
    scorer = PairwiseFunctionScorer(brighter, batch_size=batch_size)
    found = scorer.score(request_of(groups)).rewards
    for group in "abc":
        assert found[[row for row, own in enumerate(groups) if own == group]].tolist() == [0.0, 0.5, 1.0]


def test_soft_comparisons_by_hand():
    found = PairwiseFunctionScorer(logistic, sharpness=2.0).score(request_of(["a", "a"], [0.2, 0.7])).rewards
    expected = 1 / (1 + math.exp(1.0))
    assert found.tolist() == pytest.approx([expected, 1 - expected], abs=1e-6)


def test_strengths_follow_the_logistic_function():
    greys = [0.1, 0.5, 0.9]
    scorer = PairwiseFunctionScorer(logistic, sharpness=2.0, ranking="bradley_terry")
    found = scorer.score(request_of(["a"] * 3, greys)).rewards
    assert found.argsort().tolist() == [0, 1, 2]
    assert float(found.mean()) == pytest.approx(0, abs=1e-6)


def test_a_group_of_one_is_refused():
    with pytest.raises(ContractError, match="a group of 1 sample has nothing to compare"):
        PairwiseFunctionScorer(brighter).score(request_of(["a", "b", "b"]))


def undecided(first, second, prompts, metadata):
    """Cannot say anything where a grey is near 0.5."""
    near = (first.mean((1, 2, 3)) - 0.5).abs() < 0.01
    near |= (second.mean((1, 2, 3)) - 0.5).abs() < 0.01
    return [None if unknown else float(wins) for unknown, wins in zip(near, brighter(first, second, 0, 0), strict=True)]


def test_comparisons_without_an_answer_fail_their_group():
    request = request_of(["a"] * 3 + ["b"] * 3, [0.1, 0.5, 0.9, 0.2, 0.3, 0.4])
    found = PairwiseFunctionScorer(undecided).score_isolated(request, "sample")
    assert found.successes == [False] * 3 + [True] * 3
    assert str(found.errors[0]).startswith("2 of the 3 comparisons of its group have no answer: undecided cannot say")


def test_a_share_of_them_may_be_left_out():
    request = request_of(["a"] * 4, [0.1, 0.3, 0.9, 0.7])

    def shy(first, second, prompts, metadata):
        found = brighter(first, second, prompts, metadata).double()
        found[0] = math.nan  # of the samples 1 and 0
        return found

    found = PairwiseFunctionScorer(shy, max_failed=0.2).score(request).rewards
    assert found.tolist() == pytest.approx([0.0, 0.0, 1.0, 2 / 3])
    with pytest.raises(RewardError, match="1 of the 6 comparisons"):
        PairwiseFunctionScorer(shy, max_failed=0.1).score(request)


def test_what_is_no_probability_is_refused():
    def wrong(first, second, prompts, metadata):
        return [1.5] * len(prompts)

    with pytest.raises(ContractError, match=r"a comparison gave 1\.5, which is no probability"):
        PairwiseFunctionScorer(wrong).score(request_of(["a", "a"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opponents": 3}, "opponents = 3 must be even, so that all samples have equally many. Set it to 4"),
        ({"ranking": "elo"}, "ranking = 'elo' must be one of win_rate, bradley_terry"),
        ({"max_failed": 1.5}, "max_failed"),
        ({"sharpens": 1.0}, "cannot be called with 4 inputs and the keywords"),
    ],
)
def test_mistakes_have_messages(options, message):
    with pytest.raises(ConfigError, match=message):
        PairwiseFunctionScorer(brighter, **options)
