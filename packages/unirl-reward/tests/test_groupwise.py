"""Scorers that compare the samples of a group: whole groups reach them, whatever cuts the samples elsewhere."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.reward.child.scorer import ChildScorer
from unirl.reward.function import FunctionRewardScorer
from unirl.reward.grouping import whole_groups
from unirl.reward.local.video.frames import FrameScorer
from unirl.reward.remote import RemoteRewardBackend
from unirl.reward.service import RewardService
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest
from unirl.types.rollout import RolloutReq, RolloutResp

from .fake_server import FakeServer
from .scorers_of_tests import ranks

GROUPS = ["a", "a", "a", "b", "b", "b", "c", "c", "c"]


def request_of(groups, values=None):
    """Images of one grey each, of these groups."""
    values = torch.linspace(0.1, 0.9, len(groups)) if values is None else torch.tensor(values)
    return RewardRequest(
        sample_ids=[f"s{row}" for row in range(len(groups))],
        group_ids=list(groups),
        primitives={"text": Texts(texts=list(groups))},
        generated={"image": Images(pixels=values.float()[:, None, None, None].expand(-1, 3, 4, 4).clone())},
        metadata=[None] * len(groups),
    )


class GroupMean(LocalScorer):
    """Grey of a sample less the mean of its group; remembers the groups of every call. wrong: fails these samples."""

    is_groupwise = True

    def __init__(self, *, batch_size: int = 4, name: str = "centred", wrong=()) -> None:
        super().__init__(name=name, batch_size=batch_size)
        self.calls, self.wrong = [], wrong

    def score_batch(self, request: RewardRequest) -> Tensor:
        self.calls.append(list(request.group_ids))
        if broken := set(request.sample_ids) & set(self.wrong):
            raise ValueError(f"cannot read {min(broken)}")
        return centred(request)


class Grey(LocalScorer):
    """The grey of a sample."""

    def __init__(self, *, name: str = "grey") -> None:
        super().__init__(name=name)

    def score_batch(self, request: RewardRequest) -> Tensor:
        return request.pixels.mean((1, 2, 3))


def centred(request: RewardRequest) -> Tensor:
    greys = request.pixels.mean((1, 2, 3)).double()
    means = {
        group: greys[[row for row, own in enumerate(request.group_ids) if own == group]].mean()
        for group in set(request.group_ids)
    }
    return (greys - torch.stack([means[group] for group in request.group_ids])).float()


@pytest.mark.parametrize(
    ("groups", "most", "parts"),
    [
        (GROUPS, 4, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        (GROUPS, 6, [[0, 1, 2, 3, 4, 5], [6, 7, 8]]),
        (GROUPS, 1, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        (["a", "b", "a", "b"], 2, [[0, 2], [1, 3]]),
        (["a", "b", "a", "b"], 4, [[0, 2, 1, 3]]),
        (["a", "b", "b", "c"], 3, [[0, 1, 2], [3]]),
    ],
)
def test_batches_are_whole_groups(groups, most, parts):
    assert whole_groups(groups, most) == parts


@pytest.mark.parametrize("groups", [GROUPS, ["a", "b", "c"] * 3])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 64])
def test_no_batch_cuts_a_group(groups, batch_size):
    scorer, request = GroupMean(batch_size=batch_size), request_of(groups)
    assert torch.equal(scorer.score(request).rewards, centred(request))
    assert sorted(sum(scorer.calls, [])) == sorted(groups)
    assert all(call.count(group) == 3 for call in scorer.calls for group in call)


@pytest.mark.parametrize("sizes", [[9], [1] * 9, [2, 2, 2, 3], [4, 5]])
@pytest.mark.parametrize("batch_size", [1, 4, 6])
def test_samples_that_come_in_pieces_reach_the_scorer_as_whole_groups(sizes, batch_size):
    request, scorer = request_of(GROUPS), GroupMean(batch_size=batch_size)
    service, start = RewardService([scorer]), sizes[0]
    ticket = service.submit_part(request.slice(0, start))
    for size in sizes[1:]:
        service.submit_part(request.slice(start, start + size), ticket)
        start += size
    assert torch.equal(service.collect(ticket).rewards, centred(request))
    whole = GroupMean(batch_size=batch_size)
    whole.score(request)
    assert scorer.calls == whole.calls
    service.close()


def test_groups_are_scored_while_more_samples_come():
    scorer = GroupMean(batch_size=1)
    service = RewardService([scorer])
    ticket = service.submit_part(request_of(GROUPS).slice(0, 7))
    service.submit_part(request_of(GROUPS).slice(7, 8), ticket)
    for job in service._open[ticket][1]["centred"].jobs:
        job.answer.result(60)
    assert scorer.calls == [["a"] * 3, ["b"] * 3]
    service.close()


def test_a_group_that_comes_apart_is_refused():
    service = RewardService([GroupMean()])
    with pytest.raises(ContractError, match="samples of group a came apart, but scorer centred compares them"):
        service.submit(request_of(["a", "b", "a"]))
    service.close()


def test_a_request_without_groups_is_refused():
    with pytest.raises(ContractError, match="centred compares samples of a group; the request has no group_ids"):
        GroupMean().score(request_of(GROUPS).replace(group_ids=[]))


def test_a_failed_sample_takes_its_group_with_it_and_no_other():
    request = request_of(GROUPS)
    found = GroupMean(batch_size=64, wrong=["s4"]).score_isolated(request, "sample")
    assert found.successes == [True] * 3 + [False] * 3 + [True] * 3
    assert all("cannot read s4" in str(error) for error in found.errors[3:6])
    assert torch.equal(found.rewards[[0, 1, 2, 6, 7, 8]], centred(request)[[0, 1, 2, 6, 7, 8]])


def test_pixels_that_are_no_numbers_take_their_group_with_them():
    request = request_of(GROUPS)
    request.pixels[7, 0, 0, 0] = math.nan
    found = GroupMean(batch_size=64).score_isolated(request, "sample")
    assert found.errors[6] == "group c cannot be compared because sample s7 failed"
    assert "non-finite" in str(found.errors[7])
    assert found.rewards.isfinite().tolist() == [True] * 6 + [False] * 3


def test_a_retry_asks_about_the_whole_group():
    scorer = GroupMean(batch_size=64)
    fates = iter([["s4"], []])
    ask = scorer.score_batch

    def score_batch(request):
        scorer.wrong = next(fates, [])
        return ask(request)

    scorer.score_batch = score_batch
    request = request_of(GROUPS)
    scored = RewardService([scorer], on_failure="retry").score(request)
    assert scorer.calls == [GROUPS, GROUPS]
    assert torch.equal(scored.rewards, centred(request))
    assert scored.counters is not None
    assert scored.counters["retried_samples"] == 9


def test_under_raise_the_message_names_the_samples():
    with pytest.raises(RewardError, match="scorer centred failed on samples s0, s1, s2: ValueError: cannot read s1"):
        GroupMean(wrong=["s1"]).score(request_of(GROUPS))


class Gradient(GroupMean):
    is_differentiable = True

    def score_batch_with_gradient(self, request: RewardRequest) -> Tensor:
        return centred(request)


def test_gradients_keep_the_order_of_the_samples():
    request = request_of(["a", "b", "c"] * 3)
    assert torch.equal(Gradient(batch_size=3).score_with_gradient(request), centred(request))


# Function scorers ---------------------------------------------------------------------------------------------------


def spread(images, prompts, metadata):
    greys = images.mean((1, 2, 3))
    return {"high": greys - greys.min(), "low": greys.max() - greys}


def test_a_function_gets_one_group_at_a_time():
    request = request_of(["a", "b", "a", "b", "a"], [0.5, 0.9, 0.1, 0.2, 0.7])
    scorer = FunctionRewardScorer(ranks, groupwise=True, batch_size=64)
    assert scorer.score(request).rewards.tolist() == [1, 1, 0, 0, 2]


def test_a_function_of_groups_may_return_components():
    request = request_of(["a", "b", "a", "b"], [0.5, 0.9, 0.1, 0.2])
    scorer = FunctionRewardScorer(spread, groupwise=True, component_weights={"high": 1.0, "low": 0.5})
    found = scorer.score(request)
    assert torch.allclose(found.component_rewards["spread/high"], torch.tensor([0.4, 0.7, 0.0, 0.0]))
    assert torch.allclose(found.rewards, torch.tensor([0.4, 0.7, 0.2, 0.35]))


def test_a_function_of_samples_is_not_groupwise():
    assert not FunctionRewardScorer(ranks).is_groupwise


def test_frames_of_videos_are_no_group():
    with pytest.raises(ConfigError, match="centred compares samples of a group, and frames of a video are none"):
        FrameScorer(scorer=GroupMean())


# Elsewhere ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [GROUPS, ["a", "b", "c"] * 3])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_a_server_gets_whole_groups(groups, batch_size):
    request = request_of(groups)
    with FakeServer({"centred": GroupMean()}) as server:
        scorer = RemoteRewardBackend(server.url, ["centred"], groupwise=True, batch_size=batch_size)
        assert torch.equal(scorer.score(request).rewards, centred(request))
        assert len(server.asked) == (1 if batch_size == 7 else 3) + (batch_size == 7)
        scorer.close()


def test_a_server_that_compares_groups_wants_to_be_told_so():
    with (
        FakeServer({"centred": GroupMean()}) as server,
        pytest.raises(ConfigError, match="centred of http://.* compares the samples of a prompt.*Set groupwise: true"),
    ):
        RemoteRewardBackend(server.url, ["centred"])


def child(function, **options):
    arguments = {"function": f"scorers_of_tests.{function}", "groupwise": True}
    variables = {"PYTHONPATH": str(Path(__file__).parent)}
    return ChildScorer("unirl.reward.function.FunctionRewardScorer", None, arguments, variables=variables, **options)


def test_a_child_process_compares_whole_groups():
    request = request_of(["a", "b", "a", "b", "a"], [0.5, 0.9, 0.1, 0.2, 0.7])
    scorer = child("ranks", groupwise=True, name="ranks")
    assert scorer.score(request).rewards.tolist() == [1, 1, 0, 0, 2]
    scorer.close()
    scorer = child("ranks")
    with pytest.raises(ConfigError, match="compares the samples of a prompt, which must come together. Set groupwise"):
        scorer.score(request)
    scorer.close()


# Evaluations --------------------------------------------------------------------------------------------------------


def response_of(request):
    req = RolloutReq(
        sample_ids=request.sample_ids, group_ids=request.group_ids, primitives=request.primitives, metadata=[]
    )
    track = req.make_root_track(conditions={}, segment=None, decoded=request.generated["image"])
    return RolloutResp(tracks={"image": track})


@pytest.mark.parametrize("is_async", [False, True])
def test_an_evaluation_leaves_comparisons_out(is_async):
    request = request_of(["a", "b", "c"])
    scorer = GroupMean()
    service = RewardService([scorer, Grey()], weights={"centred": 1.0, "grey": 0.0})
    resp = response_of(request)
    if is_async:
        service.take(resp)
    service.score_track(resp, "image", is_training=False)
    assert list(resp.tracks["image"].component_rewards) == ["grey"]
    assert torch.equal(resp.tracks["image"].rewards, request.pixels.mean((1, 2, 3)))
    assert scorer.calls == []
    service.close()


def test_training_has_both_with_their_weights():
    request = request_of(GROUPS)
    resp = response_of(request)
    RewardService([GroupMean(), Grey()], weights={"centred": 1.0, "grey": 0.0}).score_track(resp, "image")
    assert torch.equal(resp.tracks["image"].rewards, centred(request))
    assert list(resp.tracks["image"].component_rewards) == ["centred", "grey"]


def test_an_evaluation_with_weights_keeps_those():
    request = request_of(["a", "b"])
    resp = response_of(request)
    RewardService([GroupMean(), Grey()], weights={"centred": 1.0, "grey": 3.0}).score_track(
        resp, "image", is_training=False
    )
    assert torch.equal(resp.tracks["image"].rewards, 3 * request.pixels.mean((1, 2, 3)))


def test_an_evaluation_by_comparisons_alone_is_refused():
    with pytest.raises(ConfigError, match="one sample per prompt, and centred compare samples of a prompt"):
        RewardService([GroupMean()]).score_track(response_of(request_of(["a"])), "image", is_training=False)


def test_scorers_elsewhere_are_left_out_of_evaluations_too():
    resp = response_of(request_of(["a", "b"]))
    elsewhere = RewardService([GroupMean()])
    last = RewardService([Grey()], {"grey": 0.0, "centred": 1.0}, elsewhere=["centred"])
    elsewhere.score_part(resp, "image", is_training=False)
    last.score_track(resp, "image", is_training=False)
    assert torch.equal(resp.tracks["image"].rewards, resp.tracks["image"].component_rewards["grey"])
