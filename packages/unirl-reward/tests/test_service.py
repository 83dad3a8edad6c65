"""RewardService: composition, attaching, and every failure policy with its message."""

import dataclasses
import math
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.reward.function import FunctionRewardScorer
from unirl.reward.service import RewardService
from unirl.reward.worlds.shapes_scorer import ShapesRewardScorer
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest, RewardResponse, reward_request
from unirl.types.roles import Collect, Dispatch, remote_method
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


class RowScorer(LocalScorer):
    """The row number of each sample; wrong[row] is a list of what happens instead, one item a call."""

    def __init__(self, wrong=None, name="row", batch_size=2) -> None:
        super().__init__(name=name, batch_size=batch_size)
        self.wrong = wrong or {}
        self.calls: list[list[int]] = []

    def score_batch(self, request: RewardRequest) -> Tensor:
        rows = [int(name[1:]) for name in request.sample_ids]
        self.calls.append(rows)
        values = []
        for row in rows:
            fate = self.wrong[row].pop(0) if self.wrong.get(row) else float(row)
            if isinstance(fate, Exception):
                raise fate
            values.append(fate)
        return torch.tensor(values)


class ForeignScorer:
    """A scorer that is not a LocalScorer, as a client of a server would be."""

    name = "foreign"

    def __init__(self, rewards, successes=None, errors=None, raises=None) -> None:
        self.rewards, self.successes, self.errors, self.raises = rewards, successes, errors, raises

    def score(self, request: RewardRequest) -> RewardResponse:
        if self.raises is not None:
            raise self.raises
        return RewardResponse(
            sample_ids=request.sample_ids[: len(self.rewards)],
            rewards=torch.tensor(self.rewards),
            successes=self.successes or [],
            errors=self.errors or [],
        )


def broken(times=99, value=math.nan):
    return [value] * times


def as_rollout(request):
    req = RolloutReq(
        sample_ids=request.sample_ids,
        group_ids=request.group_ids,
        primitives=request.primitives,
        metadata=request.metadata,
    )
    track = req.make_root_track(conditions={}, segment=None, decoded=request.generated["image"])
    return RolloutResp(tracks={"image": track}), req


def test_reward_is_the_weighted_sum_of_raw_values_and_components_stay(make_request):
    twice = FunctionRewardScorer(lambda images, prompts, metadata: [10 * row["row"] for row in metadata], name="ten")
    service = RewardService([RowScorer(), twice], weights={"row": 2.0, "ten": 0.5})
    scored = service.score(make_request())
    assert scored.rewards.tolist() == [7.0 * row for row in range(6)]
    assert scored.component_rewards["row"].tolist() == [0, 1, 2, 3, 4, 5]
    assert scored.component_rewards["ten"].tolist() == [0, 10, 20, 30, 40, 50]
    assert scored.rewards.dtype == torch.float32 and scored.successes == [True] * 6 and scored.errors == [None] * 6
    assert scored.compute_s > 0 and scored.counters == {"failed_samples": 0, "dropped_groups": 0, "retried_samples": 0}


def test_weighted_mean_divides_by_the_sum_of_the_weights(make_request):
    service = RewardService(
        {"a": RowScorer(), "b": RowScorer()}, weights={"a": 3.0, "b": 1.0}, aggregation="weighted_mean"
    )
    assert service.score(make_request()).rewards.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_scorer_with_components_reports_each_and_their_weighted_sum(make_request):
    def colour(images, prompts, metadata):
        return {"red": images[:, 0].mean((1, 2)), "blue": images[:, 2].mean((1, 2))}

    request = make_request()
    scorer = FunctionRewardScorer(colour, component_weights={"red": 1.0, "blue": -2.0}, batch_size=4)
    scored = RewardService({"tint": scorer}).score(request)
    red, blue = request.pixels[:, 0].mean((1, 2)), request.pixels[:, 2].mean((1, 2))
    assert set(scored.component_rewards) == {"tint", "tint/red", "tint/blue"}
    torch.testing.assert_close(scored.component_rewards["tint/red"], red, rtol=0, atol=1e-6)
    torch.testing.assert_close(scored.rewards, red - 2 * blue, rtol=0, atol=1e-6)


def test_batches_hold_at_most_batch_size_samples_in_order(make_request):
    scorer = RowScorer(batch_size=4)
    RewardService([scorer]).score(make_request())
    assert scorer.calls == [[0, 1, 2, 3], [4, 5]]


def test_scoring_a_track_writes_rewards_components_and_errors_into_it(make_request):
    resp, _ = as_rollout(make_request())
    assert RewardService([RowScorer()]).score_track(resp, "image") == {}
    track = resp.root_track()
    assert track.rewards.tolist() == track.component_rewards["row"].tolist() == [0, 1, 2, 3, 4, 5]
    assert track.reward_errors == [None] * 6 and resp.reward_compute_s > 0
    with pytest.raises(ContractError, match="track image already has rewards"):
        RewardService([RowScorer()]).score_track(resp, "image")


@pytest.mark.parametrize("aggregation", ["weighted_sum", "weighted_mean"])
def test_services_that_have_some_scorers_each_give_the_rewards_of_one_that_has_all(make_request, aggregation):
    weights = {"a": 0.3, "b": -0.7, "c": 1.9}

    def scorers(*names):
        wrong = {"a": {}, "b": {3: broken()}, "c": {0: broken()}}
        return {name: RowScorer(wrong[name], name=name) for name in names}

    options: dict[str, Any] = {"aggregation": aggregation, "on_failure": "drop_group"}
    together, _ = as_rollout(make_request())
    RewardService(scorers("a", "b", "c"), weights, **options).score_track(together, "image")
    apart, _ = as_rollout(make_request())
    last = RewardService(scorers("b"), weights, **options, elsewhere=["a", "c"])
    with pytest.raises(ContractError, match=r"scorers \['a', 'c'\] of other pools have not scored this track"):
        last.score_track(as_rollout(make_request())[0], "image")
    for name in ("c", "a"):
        RewardService(scorers(name), {name: 1.0}, **options).score_part(apart, "image")
    assert apart.root_track().rewards is None
    last.score_track(apart, "image")
    one, other = together.root_track(), apart.root_track()
    assert one.rewards.nan_to_num(9.0).tolist() == other.rewards.nan_to_num(9.0).tolist()
    assert one.rewards.isnan().tolist() == [True] * 4 + [False] * 2
    assert one.reward_errors == other.reward_errors
    assert list(one.component_rewards) == list(other.component_rewards) == ["a", "b", "c"]
    with pytest.raises(ContractError, match="already has rewards"):
        last.score_part(apart, "image")


def test_images_of_several_sizes_are_scored_size_by_size_in_their_own_places(make_request):
    params = DiffusionSamplingParams(num_inference_steps=1, height=8, width=8)
    parts = []
    for rows, size in (([0, 3, 4], (8, 16)), ([1, 2, 5], (8, 8))):
        part = as_rollout(make_request())[0].root_track().select(rows)
        latents = torch.zeros(3, 1, 4, size[0] // 8, size[1] // 8)
        own = dataclasses.replace(params, height=size[0], width=size[1])
        segment = LatentSegment(latents=latents, sigmas=torch.tensor([1.0, 0.0]), indices=[1], params=own)
        part = part.replace(decoded=Images(pixels=torch.rand(3, 3, *size)), segment=segment)
        parts.append(part.sized(params))
    resp = RolloutResp(tracks={"image": RolloutTrack.concat(parts).select([0, 3, 4, 1, 2, 5])})
    scorer = RowScorer(batch_size=6)
    RewardService([scorer]).score_track(resp, "image")
    assert resp.root_track().scored_rewards.tolist() == [0, 1, 2, 3, 4, 5]
    assert scorer.calls == [[0, 3, 4], [1, 2, 5]] and resp.reward_compute_s > 0


def test_the_request_of_a_track_has_its_media_groups_and_the_inputs(make_request):
    resp, _ = as_rollout(make_request())
    assert reward_request(resp, "image").equals(make_request())


def test_a_track_without_media_is_refused():
    resp = RolloutResp(tracks={"image": RolloutTrack(sample_ids=["s0"])})
    with pytest.raises(ContractError, match="track image has neither decoded media nor latents to score"):
        RewardService([RowScorer()]).score_track(resp, "image")
    with pytest.raises(ContractError, match="there is no track 'video'"):
        RewardService([RowScorer()]).score_track(resp, "video")


class Loudness(LocalScorer):
    """Scores clean latents by their mean square."""

    reads_media = False

    def score_batch(self, request):
        return request.latents.square().flatten(1).mean(1)


@pytest.mark.parametrize("is_async", [False, True])
def test_latents_are_scored_where_nothing_was_decoded(make_request, is_async):
    resp, _ = as_rollout(make_request())
    track = resp.root_track()
    latents = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    kept = torch.stack([torch.zeros_like(latents), latents], dim=1)
    segment = LatentSegment(latents=kept, sigmas=torch.tensor([1.0, 0.0]), indices=[0, 1])
    resp.tracks["image"] = track.replace(decoded=None, segment=segment)
    service = RewardService([Loudness(name="loud", batch_size=4)], is_async=is_async)
    if is_async:
        for rows in ([0, 1, 2, 3], [4, 5]):
            service.take(resp.select(rows))
    service.score_track(resp, "image")
    assert torch.equal(resp.root_track().rewards, latents.square().flatten(1).mean(1))
    unscored = resp.replace(tracks={"image": track.replace(decoded=None, segment=segment)})
    with pytest.raises(ContractError, match="scorer row scores generated media; this request has nothing"):
        RewardService([RowScorer()]).score_track(unscored, "image")
    service.close()


@pytest.mark.parametrize(("credit", "expected"), [("mean", [0.5, 2.5, 4.5]), ("max", [1, 3, 5]), ("sum", [1, 5, 9])])
def test_children_are_scored_with_the_inputs_of_the_request_and_credit_their_parents(make_request, credit, expected):
    asked = make_request(num_samples=3)
    resp, req = as_rollout(asked)
    writer = req.make_root_track(conditions={}, segment=None, decoded=Texts(texts=["a", "b", "c"]))
    image = writer.fork("text", "image", 2, decoded=Images(pixels=asked.pixels.repeat_interleave(2, 0)))
    resp = RolloutResp(tracks={"text": writer, "image": image})
    request = reward_request(resp, "image")
    assert request.prompts == [prompt for prompt in asked.prompts for _ in range(2)]
    assert request.metadata == [row for row in asked.metadata for _ in range(2)]
    assert request.group_ids == [group for group in asked.group_ids for _ in range(2)]

    class Counts(RowScorer):
        def score_batch(self, request):
            return torch.arange(6.0)

    RewardService([Counts(batch_size=6)], credit=credit).score_track(resp, "image")
    assert resp.tracks["image"].scored_rewards.tolist() == [0, 1, 2, 3, 4, 5]
    assert resp.tracks["text"].scored_rewards.tolist() == expected
    assert resp.tracks["text"].reward_errors == [None] * 3


def test_a_way_of_credit_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="credit = 'median' must be one of"):
        RewardService([RowScorer()], credit="median")  # ty: ignore[invalid-argument-type]


def test_raise_names_scorer_samples_and_values(make_request):
    service = RewardService([RowScorer({3: broken(), 4: broken(value=math.inf)}, batch_size=8)])
    with pytest.raises(RewardError) as caught:
        service.score(make_request())
    text = str(caught.value)
    assert "scorer row" in text and "s3: its value is nan" in text and "s4: its value is inf" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_raise_keeps_the_cause_and_stops_at_once(make_request):
    scorer = RowScorer({2: [OSError("disk gone")]})
    with pytest.raises(RewardError, match="scorer row failed on samples s2, s3: OSError: disk gone") as caught:
        RewardService([scorer]).score(make_request())
    assert isinstance(caught.value.__cause__, OSError) and scorer.calls == [[0, 1], [2, 3]]


def test_a_message_names_a_few_samples_and_counts_the_rest(make_request):
    service = RewardService([RowScorer({row: broken() for row in range(6)}, batch_size=8)])
    with pytest.raises(RewardError, match="for 6 samples .* and 2 more"):
        service.score(make_request())


def test_a_renamed_scorer_is_called_by_the_name_in_the_recipe(make_request):
    with pytest.raises(RewardError, match="reward second: scorer row"):
        RewardService({"first": RowScorer(), "second": RowScorer({0: broken()})}).score(make_request())


def test_retry_asks_again_for_the_failed_samples_only(make_request):
    scorer = RowScorer({1: broken(1), 4: [RuntimeError("busy"), RuntimeError("busy")]})
    scored = RewardService([scorer], on_failure="retry").score(make_request())
    assert scored.rewards.tolist() == [0, 1, 2, 3, 4, 5] and scored.successes == [True] * 6
    assert scorer.calls == [[0, 1], [2, 3], [4, 5], [1, 4], [5], [1, 4]]
    assert scored.counters == {"failed_samples": 0, "dropped_groups": 0, "retried_samples": 5}


def test_retry_gives_up_after_max_retries_and_names_the_sample(make_request):
    scorer = RowScorer({1: broken()})
    with pytest.raises(RewardError, match=r"scorer row .*s1: its value is nan.*after 3 retries"):
        RewardService([scorer], on_failure="retry", max_retries=3).score(make_request())
    assert scorer.calls[3:] == [[1], [1], [1]]


def test_drop_group_gives_every_sample_of_the_group_nan_and_counts_it(make_request):
    scored = RewardService([RowScorer({3: broken()})], on_failure="drop_group").score(make_request())
    assert scored.successes == [True, True, False, False, True, True]
    assert scored.rewards.isnan().tolist() == [False, False, True, True, False, False]
    assert scored.errors[3] == "scorer row: its value is nan"
    assert scored.errors[2] == "group g1 is dropped because sample s3 failed"
    assert scored.counters == {"failed_samples": 1, "dropped_groups": 1, "retried_samples": 0}
    assert scored.component_rewards["row"][2] == 2 and scored.component_rewards["row"][3].isnan()


def test_drop_group_drops_only_the_group_whose_sample_raises_not_its_whole_batch(make_request):
    scorer = RowScorer({3: [ValueError("no prompt"), ValueError("no prompt")]}, batch_size=6)
    scored = RewardService([scorer], on_failure="drop_group").score(make_request())
    assert scored.successes == [True, True, False, False, True, True]
    assert re.fullmatch(r"scorer row: ValueError: no prompt \(test_service\.py:\d+\)", str(scored.errors[3]))
    assert scorer.calls == [[0, 1, 2, 3, 4, 5], [0], [1], [2], [3], [4], [5]]


def test_a_failed_component_never_becomes_a_mean_over_the_others(make_request):
    service = RewardService(
        {"a": RowScorer(), "b": RowScorer({0: broken()})}, aggregation="weighted_mean", on_failure="drop_group"
    )
    scored = service.score(make_request(per_group=1))
    assert scored.rewards[0].isnan() and scored.successes == [False] + [True] * 5
    assert scored.counters == {"failed_samples": 1, "dropped_groups": 1, "retried_samples": 0}


def test_a_zero_weight_records_a_scorer_and_its_failure_still_counts(make_request):
    service = RewardService({"a": RowScorer(), "b": RowScorer({0: broken()})}, weights={"a": 1.0, "b": 0.0})
    with pytest.raises(RewardError, match="reward b"):
        service.score(make_request())


def test_counters_add_up_and_order_stays_when_shards_join(make_request):
    request = make_request(num_samples=8)
    service = RewardService([RowScorer({1: broken(), 6: broken()})], on_failure="drop_group")
    whole = RewardService([RowScorer({1: broken(), 6: broken()})], on_failure="drop_group").score(request)
    shards = [service.score(request.slice(start, start + 4)) for start in (0, 4)]
    joined = type(shards[0]).concat(shards)
    assert joined.counters == whole.counters == {"failed_samples": 2, "dropped_groups": 2, "retried_samples": 0}
    assert joined.sample_ids == whole.sample_ids and joined.errors == whole.errors
    assert torch.equal(joined.rewards.nan_to_num(-1), whole.rewards.nan_to_num(-1))


def test_a_shard_whose_scorer_fails_on_everything_joins_the_others(make_request):
    request = make_request(num_samples=4)
    scorer = FunctionRewardScorer(_fails_on_the_first_rows, name="f", component_weights={"x": 1.0, "y": 1.0})
    service = RewardService([scorer], on_failure="drop_group")
    joined = RewardResponse.concat([service.score(request.slice(0, 2)), service.score(request.slice(2, 4))])
    assert joined.successes == [False, False, True, True]


def _fails_on_the_first_rows(images, prompts, metadata):
    if metadata[0]["row"] < 2:
        raise ZeroDivisionError("first shard")
    return {"x": [1.0] * len(metadata), "y": [2.0] * len(metadata)}


@pytest.mark.parametrize("policy", ["raise", "retry", "drop_group"])
def test_a_wrong_shape_or_a_bug_is_raised_under_every_policy(make_request, policy):
    with pytest.raises(ContractError, match=r"shape \(1,\) for 6 samples"):
        RewardService([FunctionRewardScorer(lambda *a: [1.0], name="f")], on_failure=policy).score(make_request())
    with pytest.raises(TypeError, match="bug"):
        RewardService([RowScorer({0: [TypeError("bug")]})], on_failure=policy).score(make_request())


def test_non_finite_pixels_fail_their_sample_and_are_not_scored(make_request):
    request = make_request()
    request.pixels[2, 0, 0, 0] = math.nan
    with pytest.raises(RewardError, match="s2: its generated media holds non-finite numbers"):
        RewardService([RowScorer()]).score(request)
    scorer = RowScorer()
    scored = RewardService([scorer], on_failure="drop_group").score(request)
    assert scored.successes == [True, True, False, False, True, True] and scorer.calls == [[0, 1], [3], [4, 5]]


@pytest.mark.parametrize(
    ("values", "is_scored"),
    [((3e38, 3e38), True), ((-3e38, -3e38), True), ((math.inf, -math.inf), False), ((math.inf, 0.0), False)],
)
def test_only_pixels_that_are_not_finite_fail_however_large_their_sum(make_request, values, is_scored):
    request = make_request()
    request.pixels[2, 0, 0, :2] = torch.tensor(values)
    assert RewardService([RowScorer()], on_failure="drop_group").score(request).successes[2] == is_scored


def test_a_foreign_scorer_obeys_the_policies_too(make_request):
    request = make_request(num_samples=2, per_group=1)
    with pytest.raises(RewardError, match="scorer foreign has no finite reward .*s1: its value is nan"):
        RewardService([ForeignScorer([1.0, math.nan])]).score(request)
    with pytest.raises(RewardError, match="scorer foreign failed: ConnectionError: refused"):
        RewardService([ForeignScorer([], raises=ConnectionError("refused"))]).score(request)
    scored = RewardService([ForeignScorer([1.0, 5.0], [True, False], [None, "hung"])], on_failure="drop_group").score(
        request
    )
    assert scored.rewards[0] == 1 and scored.rewards[1].isnan() and scored.errors == [None, "scorer foreign: hung"]
    gone = RewardService([ForeignScorer([], raises=RewardError("gone"))], on_failure="drop_group").score(request)
    assert gone.successes == [False, False] and gone.errors[0] == "scorer foreign: RewardError: gone"
    with pytest.raises(ContractError, match="it was asked about 2 samples"):
        RewardService([ForeignScorer([1.0])]).score(request)


def test_unknown_weights_get_the_nearest_name():
    with pytest.raises(ConfigError, match=r"weights name 'rwo'.*\['row'\]"):
        RewardService([RowScorer()], weights={"rwo": 1.0})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"weights": {}}, "weights give nothing for"),
        ({"weights": {"row": math.nan}}, "must be finite"),
        ({"weights": {"row": 0.0}}, "all 0"),
        ({"on_failure": "ignore"}, "on_failure = 'ignore' must be one of"),
        ({"aggregation": "max"}, "aggregation = 'max' must be one of"),
        ({"max_retries": 0}, "max_retries = 0"),
        ({"scorers": []}, "at least one scorer"),
        ({"scorers": [RowScorer(), RowScorer()]}, r"two scorers are called \['row'\]"),
        ({"scorers": {"a/b": RowScorer()}}, "separates scorer and component"),
        ({"scorers": {"a": 3}}, "int, which is no scorer"),
    ],
)
def test_impossible_configurations_say_what_to_change(arguments, text):
    arguments.setdefault("scorers", [RowScorer()])
    with pytest.raises(ConfigError, match=text):
        RewardService(**arguments)


def test_a_mean_of_weights_that_cancel_is_refused():
    with pytest.raises(ConfigError, match="sum to 0"):
        RewardService({"a": RowScorer(), "b": RowScorer()}, weights={"a": 1.0, "b": -1.0}, aggregation="weighted_mean")


def test_a_request_without_samples_is_refused():
    with pytest.raises(ContractError, match="without sample_ids"):
        RewardService([RowScorer()]).score(RewardRequest())


class Placed(nn.Module):
    """Records where it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[str] = []

    def to(self, *args, **kwargs):
        self.moves.extend(args)
        return self


class ModelScorer(RowScorer):
    def __init__(self) -> None:
        super().__init__()
        self.module = Placed()

    def modules(self):
        return [self.module]


def test_offload_moves_the_modules_and_scoring_meanwhile_is_an_error(make_request):
    scorer = ModelScorer()
    rule = RowScorer()
    service = RewardService({"row": scorer, "rule": rule}, device="meta")
    service.offload()
    assert scorer.module.moves == ["meta", "cpu"]
    with pytest.raises(RewardError, match=r"scorer row is offloaded; call onload\(\)"):
        service.score(make_request())
    service.onload()
    assert scorer.module.moves == ["meta", "cpu", "meta"] and not scorer.is_offloaded
    assert rule.device == "cpu"


def test_only_a_private_request_reaches_the_scorer_without_a_copy(make_request):
    seen = []

    class Sees(LocalScorer):
        def score_batch(self, request):
            seen.append(request.pixels.data_ptr())
            return torch.zeros(len(request.sample_ids))

    request = make_request()
    num = len(request.sample_ids)
    Sees(name="a", batch_size=num).score_isolated(request, "sample", is_private=True)
    Sees(name="a", batch_size=num).score_isolated(request, "sample")
    Sees(name="a", batch_size=num - 1).score_isolated(request, "sample", is_private=True)
    own = request.pixels.data_ptr()
    assert [pointer == own for pointer in seen] == [True, False, False, False]


def test_remote_methods_carry_their_markers():
    for name, collect in (("score", Collect.CONCAT), ("score_track", Collect.ALL)):
        marker = remote_method(RewardService, name)
        assert (marker.dispatch, marker.collect) == (Dispatch.DP_SCATTER, collect)
    for name in ("offload", "onload"):
        assert remote_method(RewardService, name).dispatch is Dispatch.BROADCAST


def test_the_shapes_verifier_scores_through_the_service():
    pixels = torch.zeros(2, 3, 32, 32)
    pixels[:, 0, 11:21, 11:21] = 1.0
    texts = ["a red square", "a blue square"]
    request = RewardRequest(
        sample_ids=["s0", "s1"], primitives={"text": Texts(texts=texts)}, generated={"image": Images(pixels=pixels)}
    )
    scored = RewardService([ShapesRewardScorer(strict_weight=2.0, soft_weight=1.0)]).score(request)
    assert set(scored.component_rewards) == {"shapes", "shapes/strict", "shapes/soft"}
    assert scored.component_rewards["shapes/strict"].tolist() == [1.0, 0.0]
    soft = scored.component_rewards["shapes/soft"]
    assert soft[0] == 1.0 and 0 <= soft[1] < 1 and scored.rewards.tolist() == [3.0, soft[1].item()]
    texts[1] = "an essay on circles"
    with pytest.raises(RewardError, match="scorer shapes failed on samples s0, s1"):
        RewardService([ShapesRewardScorer()]).score(request)


def test_importing_the_service_imports_no_model_framework():
    code = (
        "import sys, unirl.reward.service, unirl.reward.function, unirl.reward.worlds.shapes_scorer;"
        "heavy = {'transformers', 'PIL', 'diffusers', 'ray', 'scipy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
