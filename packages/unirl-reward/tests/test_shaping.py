"""Length shaping: the published figures, its invariants, and the service that applies it to texts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.reward.function import FunctionRewardScorer
from unirl.reward.service import RewardService
from unirl.reward.shaping import LengthShaping, overlong_penalty, truncated_rows
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment


def segment(lengths, status=None):
    tokens = [torch.zeros(length, dtype=torch.long) for length in lengths]
    return TextSegment.pack(tokens=tokens, status=None if status is None else torch.tensor(status))


def test_the_soft_penalty_is_dapos():
    # Up to 16384 tokens nothing, at 20480 the whole, in between a straight line.
    lengths = torch.tensor([0, 1, 16384, 16385, 18432, 20479, 20480, 30000])
    found = overlong_penalty(lengths, max_len=20480, buffer_len=4096)
    expected = [0, 0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-7)
    assert overlong_penalty(torch.tensor([9]), max_len=10, buffer_len=2, factor=3.0).item() == -1.5


@given(
    lengths=st.lists(st.integers(0, 64), min_size=1, max_size=8),
    buffer_len=st.integers(1, 32),
    factor=st.floats(0.01, 10),
)
@settings(max_examples=100, deadline=None)
def test_the_soft_penalty_never_rises_with_length_and_stays_in_its_range(lengths, buffer_len, factor):
    ordered = torch.tensor(sorted(lengths))
    found = overlong_penalty(ordered, max_len=32, buffer_len=buffer_len, factor=factor)
    assert (found.diff() <= 0).all() and found.max() <= 0 and found.min() >= -factor * (1 + 1e-6)
    assert (found[ordered <= 32 - buffer_len] == 0).all() and (found[ordered > 32 - buffer_len] < 0).all()


def test_a_buffer_longer_than_the_answer_is_refused():
    with pytest.raises(ConfigError, match="overlong_buffer_len = 11 must lie between 1 and max_new_tokens = 10"):
        overlong_penalty(torch.tensor([1]), max_len=10, buffer_len=11)


def test_status_says_what_was_cut_off_and_length_only_where_there_is_none():
    ended = segment([3, 3], [SegmentStatus.COMPLETED, SegmentStatus.TRUNCATED])
    assert truncated_rows(ended, 3).tolist() == [False, True]
    assert truncated_rows(segment([2, 3]), 3).tolist() == [False, True]
    with pytest.raises(ContractError, match="no status, and the request no max_new_tokens"):
        truncated_rows(segment([2]), None)


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        (LengthShaping("zero"), [1.0, 0.0, math.nan, 0.0]),
        (LengthShaping("keep"), [1.0, 2.0, math.nan, -1.0]),
        (LengthShaping("soft", 2, 0.5), [1.0, 1.5, math.nan, -1.5]),
    ],
)
def test_each_mode_on_a_case_worked_by_hand(shaping, expected):
    rewards = torch.tensor([1.0, 2.0, math.nan, -1.0])
    found = shaping(rewards, segment([2, 4, 4, 4]), 4)
    torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none",), "truncated_reward = 'none' must be one of"),
        (("zero", 10), "{'overlong_buffer_len': 10} does nothing where truncated_reward is 'zero'"),
        (("keep", None, 1.0), "{'overlong_penalty_factor': 1.0} does nothing"),
        (("soft", 10, -1.0), "factor = -1.0 must be above 0"),
        (("soft", 0), "buffer_len = 0 must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigError) as caught:
        LengthShaping(*arguments)
    assert message in str(caught.value)


def rollout(params):
    req = RolloutReq(
        sample_ids=["a", "b", "c"], group_ids=["g"] * 3, primitives={"text": Texts(texts=["?"] * 3)},
        sampling_params=params,
    )  # fmt: skip
    track = req.make_root_track(
        conditions={}, segment=segment([1, 3, 4]).replace(params=params), decoded=Texts(texts=["one", "three", "four"])
    )
    return RolloutResp(tracks={"text": track})


def service(**keywords):
    return RewardService([FunctionRewardScorer(lambda texts, prompts, rows: [1.0] * len(texts), name="f")], **keywords)


PARAMS = ARSamplingParams(temperature=1.0, max_new_tokens=4)


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, [1.0, 1.0, 0.0]),
        ({"truncated_reward": "keep"}, [1.0, 1.0, 1.0]),
        ({"truncated_reward": "soft", "overlong_buffer_len": 2}, [1.0, 0.5, 0.0]),
    ],
)
def test_attached_rewards_are_shaped_and_components_and_evaluation_are_not(keywords, expected):
    evaluated = rollout(PARAMS)
    service(**keywords).score_track(evaluated, "text", is_training=False)
    assert evaluated.root_track().rewards.tolist() == [1.0, 1.0, 1.0]
    resp = rollout(PARAMS)
    service(**keywords).score_track(resp, "text")
    assert resp.root_track().rewards.tolist() == expected
    assert resp.root_track().component_rewards["f"].tolist() == [1.0, 1.0, 1.0]


def test_the_default_buffer_must_fit_the_answers():
    resp = rollout(PARAMS)
    with pytest.raises(ConfigError, match="overlong_buffer_len = 4096 .* max_new_tokens = 4"):
        service(truncated_reward="soft").score_track(resp, "text")


def test_shaping_needs_to_know_how_long_a_text_may_be():
    resp = rollout(None)
    with pytest.raises(ContractError, match="truncated_reward = soft needs max_new_tokens"):
        service(truncated_reward="soft", overlong_buffer_len=1).score_track(resp, "text")
    assert resp.root_track().rewards is None
