"""Requests of several stages that are ended early go on, and have the tracks of those that were not."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rollout_fakes import LinearPipeline
from test_stages import IMAGES, PLAN, TEXTS, SizedDrawing, Sizing, request
from test_trainside_text import FiveWords
from torch import nn

from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.rollout.engine.replica.text import ReplicaTextEngine
from unirl.rollout.stages.engine import StagesEngine
from unirl.rollout.stages.reading import Asked, Instruction, Redraw, Thought, WrittenPrompt
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment, SegmentStatus, SizedLatents, TextSegment
from unirl.types.stages import BuiltStage
from unirl.types.storage import load_rollout, save_rollout
from unirl.types.weights import WeightBucket, weight_spec


class Clock:
    """Ticks at each token and each call of a model, and aborts at one tick."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.left = -1

    def tick(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            self.engine.abort()


class Writing(FiveWords):
    """Writes token by token, all texts together."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def generate(self, conditions, params, *, noise_keys, any_rank=None, num_begun=None, is_ending=None, kept=None):
        self.clock.tick()
        whole: Any = super().generate(conditions, params, noise_keys=noise_keys)
        begun, num = num_begun or [0] * len(noise_keys), 0
        while num < params.max_new_tokens and not (is_ending and is_ending()):
            num += 1
            self.clock.tick()
        tokens, logp, ends = [], [], []
        rows = zip(whole.unpack("tokens"), whole.unpack("log_probs"), begun, whole.status.tolist(), strict=True)
        for own, probs, first, end in rows:
            tokens.append(own[first : first + num])
            logp.append(probs[first : first + num])
            ends.append(SegmentStatus.ABORTED if first + num < len(own) else end)
        return TextSegment.pack(tokens=tokens, log_probs=logp, status=torch.tensor(ends), params=params)


class Thinking(Writing, Sizing):
    """Thoughts of an even number of tokens, and others, ask for two sizes."""

    def chosen_sizes(self, segment):
        return [self.image_sizes[len(tokens) % 2] for tokens in segment.unpack("tokens")]


def writer(clock: Clock, words: Any = None) -> Any:
    bundle: Any = SimpleNamespace(trainable_modules=lambda: {"model": nn.Linear(1, 5, bias=False)})
    pipeline: Any = words or Writing(clock)
    return ReplicaTextEngine(pipeline, bundle=bundle, dtype="fp32", forward_batch_size=3), pipeline


def painter(clock: Clock, field: Any = None) -> Any:
    """A painter whose copy has a weight that the images do not depend on. It ticks at each batch and each step."""
    bundle: Any = SimpleNamespace(trainable_modules=lambda: {"transformer": nn.Linear(1, 5, bias=False)})
    pipeline: Any = field or LinearPipeline()
    diffuse = pipeline.diffuse

    def ticking(*args: Any, is_ending: Any, **options: Any) -> Any:
        def asked() -> bool:
            clock.tick()
            return is_ending()

        return diffuse(*args, is_ending=asked, **options)

    pipeline.diffuse = ticking
    return ReplicaRolloutEngine(pipeline, bundle=bundle, dtype="fp32", forward_batch_size=5), pipeline


def built(made: Any, reader: Any, policy: str, grows_from: str | None = None) -> BuiltStage:
    engine, pipeline = made
    return BuiltStage(
        engine=engine,
        pipeline=pipeline,
        reader=reader,
        policy=policy,
        grows_from=grows_from,
        can_resume=engine.can_resume,
    )


def two(clock: Clock) -> tuple[dict[str, BuiltStage], RolloutReq]:
    stages = {
        "text": built(writer(clock), Asked(), "writer"),
        "image": built(painter(clock), WrittenPrompt(), "painter", "text"),
    }
    return stages, request()


def three(clock: Clock) -> tuple[dict[str, BuiltStage], RolloutReq]:
    stages, _ = two(clock)
    stages["critique"] = built(writer(clock), Instruction("{prompt} as {text}"), "critic", "text")
    stages["image"] = dataclasses.replace(stages.pop("image"), grows_from="critique")
    return stages, request(stages={"text": TEXTS, "critique": TEXTS, "image": IMAGES})


def redrawn(clock: Clock) -> tuple[dict[str, BuiltStage], RolloutReq]:
    stages, _ = two(clock)
    stages["redraw"] = dataclasses.replace(stages["image"], reader=Redraw(0.6), grows_from="image")
    plan = dataclasses.replace(PLAN, sigmas=PLAN.sigmas * 0.6)
    once = dataclasses.replace(IMAGES, samples_per_prompt=1)
    asked = request(stages={"text": TEXTS, "image": IMAGES, "redraw": once})
    return stages, asked.replace(plans={**asked.plans, "redraw": plan})


def sized(clock: Clock) -> tuple[dict[str, BuiltStage], RolloutReq]:
    words = Thinking(clock)
    stages = {
        "text": built(writer(clock, words), Asked(), "default"),
        "image": built(painter(clock, SizedDrawing()), Thought(), "default", "text"),
    }
    images = dataclasses.replace(IMAGES, height=8, width=8, eta=0.0, sde_indices=None)
    plan = dataclasses.replace(PLAN, latent_shape=(2, 1, 1))
    return stages, request(stages={"text": TEXTS, "image": images}).replace(plans={"image": plan})


RUNS = {"two": two, "three": three, "redrawn": redrawn}


def push(engine: Any, version: int) -> None:
    name = "weight"
    value = torch.full((5, 1), float(version))
    spec = weight_spec(name, value)
    engine.begin_weights(version, [spec])
    engine.receive_weights(WeightBucket(version, {name: value}, (spec,)))
    engine.finish_weights(version)


def same(found: RolloutResp, whole: RolloutResp) -> None:
    """The same tracks but for versions."""
    assert list(found.tracks) == list(whole.tracks)
    for name, track in found.tracks.items():
        kept: Any = dict.fromkeys(("policy_versions", "last_versions", "is_unfinished"))
        plain = [_without_versions(each.replace(**kept)) for each in (track, whole.tracks[name])]
        assert plain[0].equals(plain[1]), name


def _without_versions(track: RolloutTrack) -> RolloutTrack:
    segment = track.segment
    assert isinstance(segment, (TextSegment, LatentSegment, SizedLatents))
    return track.replace(segment=segment.replace(versions=None))


def whole(make: Any) -> RolloutResp:
    stages, req = make(Clock())
    return StagesEngine(stages).generate(req)


def cut(clock: Clock, engine: Any, req: RolloutReq, rng: random.Random, between: Any = None) -> tuple[RolloutResp, int]:
    """What a request gives that is cut until it is whole, and how often it was cut."""
    clock.engine, begun, num = engine, None, 0
    while begun is None or not req.is_answered_by(begun):
        if begun is not None and between is not None:
            begun = between(begun)
        clock.left = rng.randint(1, 9)
        assert num < 99, "it does not get on"
        begun, num = engine.generate(req, None, begun), num + 1
    return begun, num - 1


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("seed", range(12))
def test_a_request_that_is_cut_at_any_moment_has_the_bits_of_one_that_was_not(make, seed, tmp_path):
    clock, rng = Clock(), random.Random(seed)
    stages, req = make(clock)

    def stored(begun: RolloutResp) -> RolloutResp:
        save_rollout(tmp_path / "begun.safetensors", begun)
        return load_rollout(tmp_path / "begun.safetensors")[0]

    found, num = cut(clock, StagesEngine(stages), req, rng, stored if seed % 2 else None)
    assert num > 0 and found.num_unfinished == 0
    same(found, whole(make))


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("seed", range(6))
def test_shards_that_were_cut_in_other_stages_join_and_go_on_in_any_division(make, seed):
    """Two workers were cut where they were; a single one, or two with other rows, go on with both."""
    clock, rng = Clock(), random.Random(seed)
    stages, req = make(clock)
    engine = clock.engine = StagesEngine(stages)
    parts = []
    for own, left in ((req.slice(0, 2), rng.randint(1, 12)), (req.slice(2, 4), rng.randint(1, 30))):
        clock.left = left
        parts.append(engine.generate(own))
    begun = RolloutResp.concat(parts)
    clock.left = -1
    if seed % 2:
        found = engine.generate(req, None, begun)
    else:
        bounds = ((0, 1), (1, 4))
        found = RolloutResp.concat(
            [engine.generate(req.slice(*own), None, begun.select(range(*own))) for own in bounds]
        )
    assert req.is_answered_by(found)
    same(found, whole(make))


@pytest.mark.parametrize("make", [two, three])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_and_step_has_the_version_of_the_push_after_which_it_was_made(make, seed):
    """Several policies, whose pushes have other versions."""
    clock, rng = Clock(), random.Random(seed)
    stages, req = make(clock)
    first = {track: 100 * number for number, track in enumerate(stages)}
    cuts: list[dict[str, list[int]]] = []

    def pushed(begun: RolloutResp) -> RolloutResp:
        cuts.append({track: made(own) for track, own in begun.tracks.items()})
        for track, stage in stages.items():
            push(stage.engine, first[track] + len(cuts))
        return begun

    found, num = cut(clock, StagesEngine(stages), req, rng, pushed)
    assert num == len(cuts) > 0
    for track, own in found.tracks.items():
        segment: Any = own.segment
        if isinstance(segment, TextSegment):
            assert own.policy_versions is not None
            versions = segment.versions_by_token(own.policy_versions).split(segment.lengths.tolist())
        else:
            versions = segment.versions_by_step(own.policy_versions)
        for row, each in enumerate(versions):
            at = [lengths[track][row] if track in lengths else 0 for lengths in cuts]
            pushes = [sum(num <= place for num in at) for place in range(len(each))]
            assert each.tolist() == [after and first[track] + after for after in pushes], track
            last = own.policy_versions if own.last_versions is None else own.last_versions
            assert last is not None and own.policy_versions is not None
            assert (int(own.policy_versions[row]), int(last[row])) == (int(each[0]), int(each[-1]))


def made(track: RolloutTrack) -> list[int]:
    """Tokens or steps of each sample."""
    segment: Any = track.segment
    return (segment.lengths if isinstance(segment, TextSegment) else segment.reached).tolist()


def test_a_stage_that_draws_sizes_is_cut_between_two_of_them_and_not_within_one():
    clock = Clock()
    stages, req = sized(clock)
    complete = whole(sized)
    image = stages["image"] = dataclasses.replace(stages["image"], can_resume=True)

    def abort() -> None:
        assert engine._uncut is not image.engine

    cast(Any, image.engine).abort = abort
    engine = clock.engine = StagesEngine(stages)
    seen = set()
    for moment in range(1, 20):
        clock.left = moment
        begun = engine.generate(req)
        if not req.is_answered_by(begun) and "image" in begun.tracks:
            track = begun.tracks["image"]
            seen.add(track.batch_size)
            assert track.is_unfinished is None and not begun.has_all_of("image")
        clock.left = -1
        same(engine.generate(req, None, begun), complete)
    assert seen and max(seen) < complete.tracks["image"].batch_size


def test_a_request_that_is_whole_is_given_back_and_the_stages_of_others_stay_as_they_are():
    stages, req = two(Clock())
    engine, complete = StagesEngine(stages), whole(two)
    assert engine.generate(req, None, complete) is complete
    text = StagesEngine({"text": stages["text"]})
    image = StagesEngine({"image": stages["image"]})
    alone = request("text")
    above = text.generate(alone)
    assert alone.is_answered_by(above) and not req.is_answered_by(above)
    same(image.generate(request("image"), None, above), complete)
