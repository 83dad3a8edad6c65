"""Advantages over turns and within them, by hand, against a loop, and in their limits; and PPO with them. float64."""

from typing import Any

import pytest
import torch
from advantaged import with_advantages
from hypothesis import given, settings
from hypothesis import strategies as st
from token_fakes import advantages_of, response, setup

from unirl.algorithms.ar_ppo import ARPPO
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.gae import Turns, packed_advantages, turn_advantages
from unirl.algorithms.tokens import text_segment
from unirl.algorithms.turn_ppo import TurnPPO
from unirl.types.errors import ConfigError, ContractError


def whole(*numbers):
    return torch.tensor(numbers, dtype=torch.long)


def reals(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_two_turns_by_hand():
    turns = Turns(tokens_K=whole(2, 3), turns_B=whole(2))
    advantages, returns = turn_advantages(
        reals(1, 4), reals(0, 2, 1, 3, 2), turns, gamma=1.0, lam=0.5, turn_gamma=0.5, turn_lam=0.5
    )
    # Over turns, at the last tokens with V = 2 and 2: A = 4 - 2 = 2, and 1 + .5 * 2 - 2 + .25 * 2 = .5.
    # Within: V differences of 2 before .5, and of 2 and -1 before 2, each later one counted half.
    expected = reals(2 + 0.5 * 0.5, 0.5, 2 + 0.5 * (-1 + 0.5 * 2), -1 + 0.5 * 2, 2)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=0)
    torch.testing.assert_close(returns, expected + reals(0, 2, 1, 3, 2), rtol=0, atol=0)


def by_loop(rewards, values, lengths, *, gamma, lam, turn_gamma, turn_lam):
    """One sample: a list of turns, each a list of values, with a reward each."""
    ends, begins, place = [], [], 0
    for length in lengths:
        begins.append(place)
        place += length
        ends.append(place - 1)
    found = [0.0] * place
    for turn in reversed(range(len(lengths))):
        last = turn + 1 == len(lengths)
        following = 0.0 if last else values[ends[turn + 1]]
        later = 0.0 if last else found[ends[turn + 1]]
        found[ends[turn]] = rewards[turn] + turn_gamma * following - values[ends[turn]] + turn_gamma * turn_lam * later
        for token in range(ends[turn] - 1, begins[turn] - 1, -1):
            found[token] = gamma * values[token + 1] - values[token] + gamma * lam * found[token + 1]
    return found


units, numbers = st.floats(0, 1), st.floats(-10, 10)


@given(st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=3), st.randoms(), *[units] * 4)
@settings(max_examples=100, deadline=None)
def test_samples_of_any_turns_agree_with_a_loop_over_each(lengths, rng, gamma, lam, turn_gamma, turn_lam):
    options = {"gamma": gamma, "lam": lam, "turn_gamma": turn_gamma, "turn_lam": turn_lam}
    rewards = [[rng.uniform(-5, 5) for _ in own] for own in lengths]
    values = [[rng.uniform(-5, 5) for _ in range(sum(own))] for own in lengths]
    expected = [
        each
        for row in zip(rewards, values, lengths, strict=True)
        for each in (by_loop(*row, **options) if row[2] else [])
    ]
    turns = Turns(whole(*sum(lengths, [])), whole(*map(len, lengths)))
    advantages, returns = turn_advantages(reals(*sum(rewards, [])), reals(*sum(values, [])), turns, **options)
    torch.testing.assert_close(advantages, reals(*expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns - advantages, reals(*sum(values, [])), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("tokens", "ones"), [((4, 2, 3), True), ((9,), False)])
def test_without_decay_and_in_one_turn_it_is_the_one_recursion(tokens, ones):
    values = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards = torch.arange(1.0, len(tokens) + 1, dtype=torch.float64)
    per_token = torch.zeros(1, 9, dtype=torch.float64)
    turns = Turns(whole(*tokens), whole(len(tokens)))
    per_token[0, turns.ends_K] = rewards
    low = {"gamma": 1.0, "lam": 1.0} if ones else {"gamma": 0.9, "lam": 0.8}
    high = {"turn_gamma": 1.0, "turn_lam": 1.0} if ones else {"turn_gamma": 0.3, "turn_lam": 0.2}
    found = turn_advantages(rewards, values, turns, **low, **high)
    expected = packed_advantages(per_token, values, whole(9), **low)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_turns_are_runs_of_chosen_tokens_within_a_sample():
    chosen = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0, 1], dtype=torch.bool)
    turns = Turns.of_runs(chosen, whole(4, 3, 0, 2))
    assert turns.tokens_K.tolist() == [2, 1, 1, 1] and turns.turns_B.tolist() == [2, 1, 0, 1]


def rewarded():
    """Samples with a hole in the middle: two turns, of which the first earned its number."""
    resp = response()
    track = resp.tracks["text"]
    segment = text_segment(track)
    mask, rewards = [], []
    for number, length in enumerate(segment.lengths.tolist()):
        own = torch.ones(length, dtype=torch.bool)
        own[1 : length - 1] = length < 3
        given = torch.zeros(length)
        given[0] = 0.1 * number
        mask.append(own)
        rewards.append(given)
    resp.tracks["text"] = track.replace(segment=segment.replace(loss_mask=torch.cat(mask), rewards=torch.cat(rewards)))
    return resp


NUM = 12
TURNS: dict[str, Any] = {"critic_seed": 3, "gamma": 0.9, "lam": 0.8}


def anchored(kind, resp, total, **options):
    made = setup(kind, **TURNS, **options)
    micro = MicroBatch(track=resp.tracks["text"].replace(advantages=total), anchor={}, update=0, progress=0.0)
    return made.algorithm.anchor(micro)


def test_the_rest_of_the_reward_is_given_at_the_last_token():
    resp, total = rewarded(), advantages_of(NUM)
    segment = text_segment(resp.tracks["text"])
    options = {"turn_gamma": 0.7, "turn_lam": 0.6}
    fields = anchored(TurnPPO, resp, total, **options)
    turns = Turns.of_runs(segment.trained, segment.lengths)
    first, place = [], 0
    for number, (num_turns, goal) in enumerate(zip(turns.turns_B.tolist(), total.double().tolist(), strict=True)):
        own = float(torch.tensor(0.1 * number))
        lengths = turns.tokens_K[place : place + num_turns].tolist()
        begin = int(turns.tokens_K[:place].sum())
        values = fields["value"].double()[begin : begin + sum(lengths)].tolist()
        rewards = [own, goal - own] if num_turns == 2 else [goal]
        first += by_loop(rewards, values, lengths, gamma=0.9, lam=0.8, **options)
        place += num_turns
    torch.testing.assert_close(fields["advantage"].double(), reals(*first), rtol=1e-5, atol=1e-5)


def test_without_levels_it_is_one_recursion_with_rewards_between():
    resp, total = rewarded(), advantages_of(NUM)
    segment = text_segment(resp.tracks["text"])
    fields = anchored(TurnPPO, resp, total)
    lengths = whole(*(int(own.sum()) for own in segment.unpack("loss_mask")))
    assert segment.rewards is not None
    rewards_M = segment.rewards[segment.trained].double()
    rows = [own.clone() for own in rewards_M.split(lengths.tolist())]
    for own, goal in zip(rows, total.double(), strict=True):
        own[-1] += goal - own.sum()
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    advantages, returns = packed_advantages(padded, fields["value"], lengths, gamma=0.9, lam=0.8)
    torch.testing.assert_close(fields["advantage"].double(), advantages, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fields["return"].double(), returns, rtol=1e-5, atol=1e-5)


def test_turns_that_earn_nothing_by_themselves_are_those_of_the_plain_critic():
    resp, total = rewarded(), advantages_of(NUM)
    track = resp.tracks["text"]
    segment = text_segment(track)
    nothing = segment.replace(rewards=torch.zeros(segment.tokens.numel()))
    resp.tracks["text"] = track.replace(segment=nothing)
    for name, value in anchored(ARPPO, resp, total).items():
        assert torch.equal(value, anchored(TurnPPO, resp, total)[name]), name


def test_training_moves_policy_and_critic():
    made = setup(TurnPPO, **TURNS, turn_gamma=1.0, turn_lam=0.9)
    metrics = made.stack.train(with_advantages(rewarded(), advantages_of(NUM)), progress=0.0).metrics
    assert metrics["ppo/value_loss"] > 0 and metrics["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turn_gamma": 1.0}, "give both, or neither"),
        ({"turn_lam": 1.0}, "give both, or neither"),
        ({"turn_gamma": 1.0, "turn_lam": 1.5}, "turn_lam = 1.5"),
        ({"turn_gamma": 1.0, "turn_lam": 1.0, "kl_in_reward": True}, "would reach no turn before its own"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        setup(TurnPPO, **TURNS, **options)


def test_a_track_without_rewards_of_turns_is_refused():
    with pytest.raises(ContractError, match="no environment answered"):
        anchored(TurnPPO, response(), advantages_of(NUM))
