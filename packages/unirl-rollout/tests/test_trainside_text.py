"""The trainside engine of text on a language model of five words, with its own seeds."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.rollout.text_checks import verify_text_segment
from unirl.sde.noise import keyed_uniform
from unirl.types.conditions import PromptCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.noise import noise_key
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment
from unirl.types.storage import load_rollout

PARAMS = ARSamplingParams(temperature=1.0, max_new_tokens=5, seed=3)
STOP = 4


class FiveWords:
    """Stands for a language model: five words, equally probable unless `logits` say otherwise; word 4 ends a sample."""

    def __init__(self) -> None:
        self.logits = torch.zeros(5)
        self.batches: list[list[str]] = []
        self.any_rank = None
        self.is_evaluating = False

    image_sizes = ()
    media_tokens = frozenset()
    tokens_before_end = 1

    def stop_token_ids(self, params):
        return tuple(sorted({STOP, *params.stop_token_ids}))

    def encode(self, primitives, params):
        rows = [torch.tensor([len(text)]) for text in primitives["text"].texts]
        return {"prompt": PromptCondition.pack(tokens=rows)}

    def generate(self, conditions, params, *, noise_keys, any_rank=None, num_begun=None, is_ending=None, kept=None):
        begun = [0] * len(noise_keys) if num_begun is None else num_begun
        assert self.is_evaluating
        self.batches.append(list(noise_keys))
        self.any_rank = any_rank
        logp = self.logits.log_softmax(-1)
        numbers = keyed_uniform(noise_keys, params.seed, (params.max_new_tokens,))
        drawn = torch.searchsorted(logp.exp().cumsum(-1), numbers).clamp(max=4)
        tokens = []
        for row in drawn:
            stops = (row == STOP).nonzero().flatten().tolist()
            tokens.append(row[: stops[0] + 1] if stops else row)
        ends = [SegmentStatus.COMPLETED if row[-1] == STOP else SegmentStatus.TRUNCATED for row in tokens]
        for row, first in enumerate(begun):
            last = first + self.tokens_before_end if is_ending is not None and is_ending() else len(tokens[row])
            ends[row] = SegmentStatus.ABORTED if last < len(tokens[row]) else ends[row]
            tokens[row] = tokens[row][first:last]
        if kept is not None:
            written = torch.tensor([first + len(row) for first, row in zip(begun, tokens, strict=True)])
            left = [row for row, end in enumerate(ends) if end == SegmentStatus.ABORTED]
            kept.take(noise_keys, [torch.tensor(num) for num in begun])
            if left:
                kept.keep("decoder", [noise_keys[row] for row in left], list(written[left]))
        return TextSegment.pack(
            tokens=tokens, log_probs=[logp[row] for row in tokens], status=torch.tensor(ends), params=params
        )

    def decode(self, segment):
        return Texts(texts=["".join("abcd."[token] for token in row) for row in segment.unpack("tokens")])

    @contextmanager
    def evaluating(self):
        self.is_evaluating = True
        yield
        self.is_evaluating = False


class Backend:
    """Stands for a backend that keeps a copy called "old", which says "a" alone."""

    policy_version = 7

    def __init__(self, pipeline):
        self.pipeline = pipeline

    def any_rank(self, value):
        return value

    @contextmanager
    def using_policy(self, name):
        kept, self.pipeline.logits = self.pipeline.logits, torch.tensor([50.0, 0, 0, 0, 0])
        yield
        self.pipeline.logits = kept


def request(num=5, params=PARAMS) -> RolloutReq:
    return RolloutReq(
        sample_ids=[f"g{i // 2}:sample:{i}" for i in range(num)],
        group_ids=[f"g{i // 2}" for i in range(num)],
        primitives={"text": Texts(texts=["cat"] * num)},
        metadata=[{"answer": i} for i in range(num)],
        sampling_params=params,
        rollout_id=4,
    )


def engine(pipeline: Any = None, **changes: Any) -> TrainsideTextEngine:
    model: Any = FiveWords() if pipeline is None else pipeline
    backend: Any = Backend(model)
    options: dict[str, Any] = {"forward_batch_size": 2, **changes}
    return TrainsideTextEngine(model, backend, **options)


def texts(engine: TrainsideTextEngine, req: RolloutReq, policy: str | None = None) -> list[str]:
    decoded = engine.generate(req, policy).tracks["text"].decoded
    assert isinstance(decoded, Texts)
    return decoded.texts


def test_a_response_holds_all_that_training_and_scoring_need():
    track = engine().generate(request()).tracks["text"]
    assert track.sample_ids == request().sample_ids and track.group_ids == request().group_ids
    assert track.metadata == request().metadata
    assert isinstance(track.segment, TextSegment) and track.segment.params == PARAMS
    assert isinstance(track.decoded, Texts)
    assert [len(text) for text in track.decoded.texts] == track.segment.lengths.tolist()
    assert track.conditions["prompt"].lengths.tolist() == [1] * 5
    assert track.policy_versions is not None and track.policy_versions.tolist() == [7] * 5


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_the_size_of_the_forwards_changes_no_sample(size):
    pipeline = FiveWords()
    made = engine(pipeline, forward_batch_size=size).generate(request())
    assert made.equals(engine(forward_batch_size=3).generate(request()))
    assert [len(batch) for batch in pipeline.batches] == [min(size, 5 - start) for start in range(0, 5, size)]
    assert sum(pipeline.batches, []) == [noise_key(4, name) for name in request().sample_ids]


def test_the_next_rollout_draws_other_tokens():
    first, second = (texts(engine(), request().replace(rollout_id=i)) for i in (0, 1))
    assert first != second


def test_a_named_policy_is_used_and_put_back():
    made = engine()
    current = texts(made, request())
    assert texts(made, request(), policy="old") == ["aaaaa"] * 5
    assert texts(made, request()) == current
    pipeline: Any = FiveWords()
    with pytest.raises(ConfigError, match="needs the engine to be given the backend"):
        TrainsideTextEngine(pipeline, forward_batch_size=2).generate(request(), policy="old")


def test_ranks_agree_on_the_number_of_steps_through_the_backend():
    pipeline = FiveWords()
    made = engine(pipeline)
    made.generate(request())
    assert pipeline.any_rank is not None
    alone: Any = pipeline
    TrainsideTextEngine(alone, forward_batch_size=2).generate(request())
    assert pipeline.any_rank is None


def test_a_dump_holds_request_and_response(tmp_path):
    resp = engine(dump_dir=str(tmp_path)).generate(request())
    loaded, asked = load_rollout(tmp_path / "rollout-000004-rank0.safetensors")
    assert loaded.equals(resp)
    assert asked is not None and asked.equals(request())


def test_a_request_for_another_kind_of_model_is_refused():
    with pytest.raises(ContractError, match="needs ARSamplingParams, the request has DiffusionSamplingParams"):
        engine().generate(request().replace(sampling_params=DiffusionSamplingParams()))
    with pytest.raises(ConfigError, match="forward_batch_size = 0"):
        engine(forward_batch_size=0)


COMPLETED, TRUNCATED, ABORTED = (
    int(s) for s in (SegmentStatus.COMPLETED, SegmentStatus.TRUNCATED, SegmentStatus.ABORTED)
)


def segment(tokens: list[int], status: int, log_probs: list[float] | None = None, **changes: Any) -> TextSegment:
    values = [-1.0] * len(tokens) if log_probs is None else log_probs
    fields: dict[str, Any] = {"log_probs": [torch.tensor(values)], "params": PARAMS, **changes}
    return TextSegment.pack(tokens=[torch.tensor(tokens, dtype=torch.long)], status=torch.tensor([status]), **fields)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (segment([0, 4], ABORTED), "sample 0 was aborted"),
        (segment([], TRUNCATED), "sample 0 has 0 tokens"),
        (segment([0] * 6, TRUNCATED), "sample 0 has 6 tokens, expected 1 to max_new_tokens = 5"),
        (segment([0, 4, 1, 4], COMPLETED), r"goes on behind a stop token: \[0, 4, 1, 4\]"),
        (segment([0, 1], COMPLETED), r"is COMPLETED but its last token is 1 \(stops: \[4\]\)"),
        (segment([0, 0, 0, 0, 4], TRUNCATED), "is TRUNCATED but its last token is 4"),
        (segment([0, 1], TRUNCATED), "is TRUNCATED after 2 of max_new_tokens = 5"),
        (segment([0, 4], COMPLETED, [-1.0, float("nan")]), "1 log-probs are not finite"),
        (segment([0, 4], COMPLETED, [-1.0, 0.5]), "at most 0, first"),
        (segment([0, 4], COMPLETED, log_probs=None).replace(log_probs=None), "returned no log-probs"),
        (segment([0, 4], COMPLETED, params=replace(PARAMS, temperature=0.5)), "the request asked for"),
    ],
)
def test_a_segment_that_is_not_what_was_asked_for_is_caught(made, message):
    with pytest.raises(ContractError, match=message):
        verify_text_segment(made, PARAMS, [STOP])


def test_a_greedy_segment_needs_no_log_probs():
    greedy = replace(PARAMS, temperature=0)
    made = segment([0, 4], COMPLETED, params=greedy).replace(log_probs=None)
    verify_text_segment(made, greedy, [STOP])
