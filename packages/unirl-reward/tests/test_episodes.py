"""Rewards of episodes: what an environment gave, and none for a group with an episode whose environment failed."""

import pytest
import torch

from unirl.reward.function import FunctionRewardScorer
from unirl.reward.local.texts.episode_return import EpisodeReturnScorer
from unirl.reward.service import RewardService
from unirl.types.episodes import EPISODE
from unirl.types.errors import ContractError, RewardError
from unirl.types.media import Texts
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import SegmentStatus, TextSegment


def rollout(*endings: SegmentStatus) -> RolloutResp:
    """Groups of two; the return of the k-th episode is k."""
    num = len(endings)
    track = RolloutTrack(
        sample_ids=[f"s{row}" for row in range(num)],
        parent_ids=[f"g{row // 2}" for row in range(num)],
        primitives={"text": Texts(texts=["?"] * num)},
        metadata=[{EPISODE: {"reward": float(row), "reason": "the board broke."}} for row in range(num)],
        segment=TextSegment.pack(tokens=[torch.ones(1, dtype=torch.long)] * num, status=torch.tensor(endings)),
        decoded=Texts(texts=["1"] * num),
    )
    return RolloutResp(tracks={"text": track})


FINE, FAILED, CUT = SegmentStatus.COMPLETED, SegmentStatus.FAILED, SegmentStatus.TRUNCATED


def test_the_reward_is_what_the_environment_gave() -> None:
    resp = rollout(FINE, CUT)
    RewardService([EpisodeReturnScorer()], truncated_reward="keep").score_track(resp, "text")
    assert resp.root_track().scored_rewards.tolist() == [0.0, 1.0]


def test_a_group_with_a_failed_episode_has_no_reward() -> None:
    resp = rollout(FINE, FINE, FINE, FAILED)
    RewardService([EpisodeReturnScorer()], on_failure="drop_group").score_track(resp, "text")
    track = resp.root_track()
    assert track.scored_rewards[:2].tolist() == [0.0, 1.0] and track.scored_rewards[2:].isnan().all()
    assert track.reward_errors == [None, None, "group g1 is dropped because sample s3 failed", "the board broke."]
    assert track.failed_groups == {"g1"}


def test_a_failed_episode_ends_the_run_unless_groups_may_be_dropped() -> None:
    with pytest.raises(RewardError, match=r"1 episodes failed, first s1: the board broke\. Mend the environment"):
        RewardService([EpisodeReturnScorer()]).score_track(rollout(FINE, FAILED), "text")


def test_a_failed_episode_drops_its_group_in_a_part_of_the_reward_too() -> None:
    resp = rollout(FINE, FAILED)

    def one(texts, prompts, metadata):
        return [1.0] * len(texts)

    apart = RewardService({"one": FunctionRewardScorer(one)}, on_failure="drop_group")
    apart.score_part(resp, "text")
    assert None not in resp.root_track().reward_errors


def test_a_number_that_no_episode_has_is_named() -> None:
    with pytest.raises(ContractError, match=r"reads 'moves' of an episode, and a sample has \['reason', 'reward'\]"):
        RewardService([EpisodeReturnScorer(key="moves")]).score_track(rollout(FINE, FINE), "text")
    resp = rollout(FINE)
    resp.root_track().metadata = [{}]
    with pytest.raises(ContractError, match="a sample has no episode. Give the recipe turns.environment"):
        RewardService([EpisodeReturnScorer()]).score_track(resp, "text")
