"""submit and collect: the rewards of `score`, made in the background; errors and samples that are never collected."""

import gc
import logging
import math
import threading
import weakref

import pytest
import torch
from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.reward.function import FunctionRewardScorer
from unirl.reward.local.images.clip import CLIPRewardScorer
from unirl.reward.scorer_queues import ScorerQueue, Ticket
from unirl.reward.service import RewardService
from unirl.types.errors import ContractError, RewardError
from unirl.types.media import Images
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.rollout import RolloutReq, RolloutResp


class MeanScorer(LocalScorer):
    """Own row plus the mean of the batch, which shows how batches were cut. wrong: row -> fates, one per call."""

    def __init__(self, batch_size=4, wrong=None, name="mean") -> None:
        super().__init__(name=name, batch_size=batch_size)
        self.wrong = wrong or {}

    def score_batch(self, request: RewardRequest) -> Tensor:
        rows = [int(name[1:]) for name in request.sample_ids]
        values = []
        for row in rows:
            fates = self.wrong.get(row)
            fate = fates.pop(0) if fates else row + float(request.pixels.mean())
            if isinstance(fate, Exception):
                raise fate
            values.append(fate)
        return torch.tensor(values)


class HeldScorer:
    """Waits for `gate` before every answer; says when it has begun and on which thread."""

    name = "held"

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.threads = set()

    def score(self, request: RewardRequest) -> RewardResponse:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.gate.wait(60)
        return RewardResponse(sample_ids=request.sample_ids, rewards=torch.arange(len(request.sample_ids)).float())


def parts_of(request, sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [request.slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def collected(service, request, sizes):
    ticket = None
    for part in parts_of(request, sizes):
        ticket = service.submit_part(part, ticket)
    return service.collect(ticket)


def same(left, right):
    """Equal in everything but the time it took."""
    return left.replace(compute_s=0.0, gauges=None).equals(right.replace(compute_s=0.0, gauges=None))


@pytest.mark.parametrize("sizes", [[11], [3, 3, 5], [1] * 11, [8, 3]])
def test_parts_are_scored_in_the_batches_of_the_whole(make_request, sizes):
    request = make_request(num_samples=11)
    scorers = {"four": MeanScorer(4), "three": MeanScorer(3)}
    assert same(collected(RewardService(scorers), request, sizes), RewardService(scorers).score(request))


def test_a_model_gives_the_same_bits_in_the_background(clip_folder, make_request):
    request = make_request(num_samples=7, size=20)
    service = RewardService([CLIPRewardScorer(model=clip_folder, batch_size=4)])
    assert same(collected(service, request, [2, 2, 3]), service.score(request))


WRONG = {1: [math.nan], 5: [ValueError("no prompt"), ValueError("no prompt")], 9: [RuntimeError("busy")]}


@pytest.mark.parametrize(
    ("policy", "wrong"), [("retry", WRONG), ("drop_group", WRONG), ("drop_group", {2: [math.nan]})]
)
def test_failures_are_treated_as_when_all_is_scored_at_once(make_request, policy, wrong):
    request = make_request(num_samples=12)
    request.pixels[7, 0, 0, 0] = math.nan if policy == "drop_group" else 0.5

    def service():
        return RewardService([MeanScorer(4, {row: list(fates) for row, fates in wrong.items()})], on_failure=policy)

    expected = service().score(request)
    assert expected.counters["retried_samples" if policy == "retry" else "failed_samples"] > 0
    assert same(collected(service(), request, [5, 5, 2]), expected)


def test_an_error_comes_out_of_collect_and_cancels_what_is_left(make_request):
    service = RewardService([MeanScorer(2, {3: [OSError("disk gone")]})])
    ticket = service.submit(make_request())
    with pytest.raises(RewardError, match="scorer mean failed on samples s2, s3: OSError: disk gone") as caught:
        service.collect(ticket)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ContractError, match="is not open"):
        service.collect(ticket)
    assert service.score(make_request()).successes == [True] * 6


def test_a_bug_comes_out_of_collect_as_it_was_raised(make_request):
    service = RewardService([MeanScorer(2, {0: [TypeError("bug")]})], on_failure="drop_group")
    with pytest.raises(TypeError, match="bug"):
        service.collect(service.submit(make_request()))


def test_retries_that_fail_end_in_the_same_message(make_request):
    service = RewardService([MeanScorer(2, {1: [math.nan] * 9})], on_failure="retry", max_retries=3)
    with pytest.raises(RewardError, match=r"s1: its value is nan.*after 3 retries"):
        collected(service, make_request(), [1, 5])


def test_a_scorer_that_gave_one_part_nothing_still_joins(make_request):
    def fails_on_the_first_rows(images, prompts, metadata):
        if metadata[0]["row"] < 2:
            raise ZeroDivisionError
        return {"x": [1.0] * len(metadata), "y": [2.0] * len(metadata)}

    scorer = FunctionRewardScorer(fails_on_the_first_rows, name="f", component_weights={"x": 1.0, "y": 1.0})
    foreign = Foreign(scorer)
    service = RewardService([foreign], on_failure="drop_group")
    scored = collected(service, make_request(num_samples=4), [2, 2])
    assert scored.successes == [False, False, True, True] and scored.rewards[2:].tolist() == [3.0, 3.0]
    assert scored.component_rewards["foreign/x"][:2].isnan().all()


class Foreign:
    """A scorer that is no LocalScorer."""

    name = "foreign"

    def __init__(self, scorer) -> None:
        self.scorer = scorer

    def score(self, request):
        return self.scorer.score(request)


def test_submit_returns_before_the_scorer_answers_and_scorers_work_side_by_side(make_request):
    held, other = HeldScorer(), MeanScorer()
    service = RewardService({"held": held, "mean": other})
    ticket = service.submit(make_request())
    assert held.begun.wait(60)
    streams = service._open[ticket][1]
    assert streams["mean"].answer().successes == [True] * 6  # while the other still waits
    held.gate.set()
    scored = service.collect(ticket)
    assert scored.component_rewards["held"].tolist() == [0, 1, 2, 3, 4, 5]
    assert held.threads == {"reward-held-0"}


def test_gauges_say_how_scoring_kept_up(make_request, monkeypatch):
    held, now, collecting = HeldScorer(), [1.0], threading.Event()

    def clock():
        """Three seconds pass, and the scorer goes on, once `collect` has looked at the clock."""
        reading = now[0]
        if collecting.is_set() and threading.current_thread() is threading.main_thread():
            now[0] = 7.0
            held.gate.set()
        return reading

    monkeypatch.setattr("unirl.reward.scorer_queues.time.perf_counter", clock)
    service = RewardService([held])
    ticket = service.submit_part(make_request().slice(0, 2))
    assert held.begun.wait(60)
    now[0] = 2.0
    service.submit_part(make_request().slice(2, 6), ticket)
    now[0] = 4.0
    collecting.set()
    found = service.collect(ticket).gauges or {}
    assert found["async/queue_depth/max"] == 6 and found["async/queue_depth/at_collect"] == 6
    assert (found["async/age_s"], found["async/wait_s"]) == (3.0, 3.0)
    assert found["async/latency_s/max"] == 6.0 and found["async/latency_s/mean"] == pytest.approx((2 * 6 + 4 * 5) / 6)
    assert found["held/utilisation"] == 1.0
    ready = service.submit(make_request())
    service._open[ready][1]["held"].answer()
    found = service.collect(ready).gauges or {}
    assert found["async/queue_depth/at_collect"] == found["async/age_s"] == found["async/wait_s"] == 0


def test_a_scorer_that_says_so_is_asked_by_several_threads(make_request):
    both = threading.Barrier(2, timeout=600)

    class Waits:
        name = "waits"
        max_concurrency = 2

        def score(self, request: RewardRequest) -> RewardResponse:
            both.wait()
            return RewardResponse(sample_ids=request.sample_ids, rewards=torch.zeros(3))

    scored = collected(RewardService([Waits()]), make_request(), [3, 3])
    assert scored.successes == [True] * 6


def rollout_of(request):
    req = RolloutReq(
        sample_ids=request.sample_ids,
        group_ids=request.group_ids,
        primitives=request.primitives,
        metadata=request.metadata,
    )
    decoded = Images(pixels=request.pixels)
    return RolloutResp(tracks={"image": req.make_root_track(conditions={}, segment=None, decoded=decoded)})


def test_chunks_that_an_engine_hands_over_are_attached_like_the_whole(make_request):
    request = make_request(num_samples=11)
    resp, again = rollout_of(request), rollout_of(request)
    service = RewardService([MeanScorer(4)], is_async=True)
    for start in range(0, 11, 3):
        service.take(resp.slice(start, min(start + 3, 11)))
    gauges = service.score_track(resp, "image")
    assert RewardService([MeanScorer(4)]).score_track(again, "image") == {}
    track, whole = resp.root_track(), again.root_track()
    assert torch.equal(track.rewards, whole.rewards) and track.reward_errors == whole.reward_errors
    assert {name: values.tolist() for name, values in track.component_rewards.items()} == {
        name: values.tolist() for name, values in whole.component_rewards.items()
    }
    assert resp.reward_compute_s > 0 and "async/wait_s" in gauges


def test_a_response_that_is_not_the_one_handed_over_is_refused(make_request):
    resp = rollout_of(make_request())
    service = RewardService([MeanScorer(4)], is_async=True)
    service.take(resp.slice(0, 4))
    with pytest.raises(ContractError, match=r"handed over samples .*s0.* \(4\) but .* \(6\) are to be scored"):
        service.score_track(resp, "image")
    assert service.score_track(resp, "image") == {}
    assert resp.root_track().reward_errors == [None] * 6


def test_closing_gives_up_what_nobody_collected_and_says_so(make_request, caplog):
    held = HeldScorer()
    service = RewardService([held])
    service.submit(make_request())
    waiting = service.submit(make_request())
    job = service._open[waiting][1]["held"].jobs[0]
    assert held.begun.wait(60)
    job.answer.add_done_callback(lambda _: held.gate.set())  # as soon as the service gives it up
    with caplog.at_level(logging.WARNING):
        service.close()
        service.close()
    assert "closed with 2 tickets whose samples were not collected" in caplog.text
    assert job.answer.cancelled()
    with pytest.raises(ContractError, match="is closed"):
        service.submit(make_request())
    assert not any(thread.name.startswith("reward-held") for thread in threading.enumerate())


def test_a_service_that_is_forgotten_ends_its_threads(make_request):
    service = RewardService([MeanScorer(name="forgotten")])
    service.collect(service.submit(make_request()))
    gone = weakref.ref(service)
    del service
    gc.collect()
    assert gone() is None
    assert not any(thread.name.startswith("reward-forgotten") for thread in threading.enumerate())


def test_media_of_scored_samples_are_not_kept_by_an_idle_lane(make_request):
    queue = ScorerQueue("queue", lambda request: RewardResponse(sample_ids=request.sample_ids, rewards=torch.zeros(6)))
    request = make_request()
    kept = weakref.ref(request)
    job = queue.submit(request, 0.0)
    job.answer.result(60)
    del request
    queue.close()
    assert kept() is None


def test_a_lane_computes_with_as_many_torch_threads_as_its_caller(make_request):
    torch.set_num_threads(1)
    found = []
    service = RewardService([FunctionRewardScorer(lambda i, p, m: found.append(torch.get_num_threads()) or [0.0] * 6)])
    service.collect(service.submit(make_request()))
    assert found == [1]


def test_tickets_of_another_service_and_empty_requests_are_refused():
    service = RewardService([MeanScorer()])
    with pytest.raises(ContractError, match=r"Ticket\(number=3\) is not open"):
        service.collect(Ticket(3))
    with pytest.raises(ContractError, match="without sample_ids"):
        service.submit(RewardRequest())
