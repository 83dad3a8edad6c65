"""Videos scored by frames, by hand-worked cases and against PickScore on images."""

import pytest
import torch

from unirl.reward.function import FunctionRewardScorer
from unirl.reward.local.images.pickscore import PickScoreRewardScorer
from unirl.reward.local.video.frames import FrameScorer, VideoPickScoreScorer, temporal_consistency
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.media import Images, Texts, Videos
from unirl.types.reward import RewardRequest

PROMPTS = ["a red cat", "a dog", "two birds"]


def brightness(images, prompts, metadata):
    return [
        float("nan") if row.get("bad") else image.mean().item() for image, row in zip(images, metadata, strict=True)
    ]


def videos(lengths=(10, 3, 1), size=16):
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(length, 3, size, size, generator=generator) for length in lengths]


def request_of(frames, metadata=None):
    names = [f"v{i}" for i in range(len(frames))]
    return RewardRequest(
        sample_ids=names,
        group_ids=names,
        primitives={"text": Texts(texts=PROMPTS[: len(frames)])},
        generated={"video": Videos.pack(frames=frames)},
        metadata=metadata or [{} for _ in frames],
    )


def test_the_reward_is_frames_and_consistency_by_their_shares():
    frames = videos()
    found = FrameScorer(scorer=FunctionRewardScorer(brightness)).score(request_of(frames))
    eight = [frames[0][[0, 1, 3, 4, 5, 6, 8, 9]].mean(), frames[1].mean(), frames[2].mean()]
    still = [1 - (video[1:] - video[:-1]).abs().mean() for video in frames[:2]] + [torch.tensor(1.0)]
    torch.testing.assert_close(found.component_rewards["video/frames"], torch.stack(eight))
    torch.testing.assert_close(found.component_rewards["video/consistency"], torch.stack(still))
    expected = 0.7 * torch.stack(eight) + 0.3 * torch.stack(still)
    torch.testing.assert_close(found.rewards, expected)


def test_consistency_by_hand():
    black, white = torch.zeros(1, 3, 2, 2), torch.ones(1, 3, 2, 2)
    assert temporal_consistency(torch.cat([black, black, black])) == 1.0
    assert temporal_consistency(torch.cat([black, white, black])) == 0.0
    assert temporal_consistency(torch.cat([black, white, white])) == 0.5
    assert temporal_consistency(black) == 1.0


def test_batches_do_not_change_a_score():
    request = request_of(videos((9, 9, 9)))
    scorers = [FrameScorer(scorer=FunctionRewardScorer(brightness, batch_size=i), batch_size=i) for i in (1, 3)]
    first, second = (scorer.score(request).rewards for scorer in scorers)
    assert torch.equal(first, second)


def test_a_frame_that_cannot_be_scored_fails_its_video_and_says_which():
    scorer = FrameScorer(scorer=FunctionRewardScorer(brightness))
    request = request_of(videos(), [{}, {"bad": True}, {}])
    found = scorer.score_isolated(request, "batch")
    assert found.successes == [True, False, True]
    assert "v1 frame 0: its value is nan" in str(found.errors[1])
    with pytest.raises(RewardError, match="v1: v1 frame 0"):
        scorer.score(request)


def test_a_picture_scorer_sees_the_prompt_of_its_video(clip_folder):
    inner = PickScoreRewardScorer(model=clip_folder, processor=clip_folder)
    frames = videos()
    found = FrameScorer(scorer=inner, num_frames=3, frames_weight=1.0, consistency_weight=0.0).score(request_of(frames))
    chosen = frames[0][[0, 4, 9]]  # 4.5 rounds to even
    expected = score_of_pictures(inner, chosen, [PROMPTS[0]] * 3).mean()
    torch.testing.assert_close(found.rewards[0], expected, rtol=0, atol=1e-6)


def score_of_pictures(scorer, pixels, prompts):
    names = [str(i) for i in range(len(prompts))]
    return scorer.score(
        RewardRequest(
            sample_ids=names,
            group_ids=names,
            primitives={"text": Texts(texts=prompts)},
            generated={"image": Images(pixels=pixels)},
        )
    ).rewards


@pytest.mark.parametrize("num_frames", [1, 4])
def test_video_pickscore_is_pickscore_of_the_first_frame_or_the_mean_of_several(clip_folder, num_frames):
    frames = videos()
    scorer = VideoPickScoreScorer(model=clip_folder, processor=clip_folder, num_frames=num_frames, batch_size=2)
    found = scorer.score(request_of(frames)).rewards
    pictures = PickScoreRewardScorer(model=clip_folder, processor=clip_folder)
    places = {1: [[0], [0], [0]], 4: [[0, 3, 6, 9], [0, 1, 2], [0]]}[num_frames]
    expected = [
        score_of_pictures(pictures, video[chosen], [prompt] * len(chosen)).mean()
        for video, chosen, prompt in zip(frames, places, PROMPTS, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-6)


def test_offloading_reaches_the_picture_scorer(clip_folder):
    inner = PickScoreRewardScorer(model=clip_folder, processor=clip_folder)
    scorer = FrameScorer(scorer=inner)
    assert scorer.modules() == inner.modules()
    scorer.offload()
    assert inner.is_offloaded
    scorer.onload()
    assert not inner.is_offloaded


def test_pictures_are_no_videos(make_request, clip_folder):
    for scorer in (
        FrameScorer(scorer=FunctionRewardScorer(brightness)),
        VideoPickScoreScorer(model=clip_folder, processor=clip_folder),
    ):
        with pytest.raises(ContractError, match=r"scores generated video; this request has \['image'\]"):
            scorer.score(make_request(num_samples=2))


def test_impossible_arguments_say_what_to_change(clip_folder):
    with pytest.raises(ConfigError, match="num_frames = 0 must be at least 1"):
        FrameScorer(scorer=FunctionRewardScorer(brightness), num_frames=0)
    with pytest.raises(ConfigError, match="num_frames = 0 must be at least 1"):
        VideoPickScoreScorer(model=clip_folder, processor=clip_folder, num_frames=0)


def differentiable(name: str, clip_folder):
    """A scorer of videos and the shares of what its value is made of."""
    if name == "video":
        return FrameScorer(scorer=PickScoreRewardScorer(model=str(clip_folder), processor=None), num_frames=2)
    return VideoPickScoreScorer(model=str(clip_folder), processor=None, num_frames=2)


@pytest.mark.parametrize("name", ["video", "video_pickscore"])
def test_the_gradient_reaches_the_frames_that_are_looked_at(clip_folder, name):
    """Value of `score` but for the rounding to bytes; gradient against a finite difference along itself, in fp64."""
    scorer = differentiable(name, clip_folder)
    coarse = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    frames = 0.1 + 0.8 * torch.nn.functional.interpolate(coarse, (32, 32), mode="bilinear")
    expected = scorer.score(request_of(list(frames.float().split(3)))).rewards
    torch.testing.assert_close(
        scorer.score_with_gradient(request_of(list(frames.float().split(3)))), expected, rtol=0, atol=0.01
    )
    for module in scorer.modules():
        module.double()
    frames.requires_grad_()
    value = scorer.score_with_gradient(request_of(list(frames.split(3)))).double().sum()
    (gradient,) = torch.autograd.grad(value, frames)
    seen = gradient.flatten(1).norm(dim=1) > 0
    assert seen.tolist() == ([True] * 6 if name == "video" else [True, False, True] * 2)
    step = 1e-3 * gradient / gradient.norm()
    ends = [
        scorer.score_with_gradient(request_of(list((frames.detach() + sign * step).split(3)))).double().sum()
        for sign in (1, -1)
    ]
    assert float(ends[0] - ends[1]) / 2e-3 == pytest.approx(float(gradient.norm()), rel=1e-2)


def test_frames_of_a_scorer_without_gradient_have_none():
    scorer = FrameScorer(scorer=FunctionRewardScorer(brightness))
    with pytest.raises(ConfigError, match="is not differentiable"):
        scorer.score_with_gradient(request_of(videos()))
