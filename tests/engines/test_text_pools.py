"""Two instances of a real text engine, fp32 on a CPU: what both were pushed, and what becomes of samples where one is
killed."""

import os
import signal
import threading
from typing import Any

import pytest
import torch
from letters_model import CONTEXT, TOLERANCE, LetterCodec, gap, letters, log_probs, request, save_qwen3
from served_engines import engine_python, marked, nightly
from test_vllm_weights import full_sync, push, state

from unirl.rollout.engine.sglang_llm.engine import SGLangRolloutEngine
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.types.rollout import RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

pytestmark = [pytest.mark.slow]
START = {
    "vllm": lambda **options: VLLMRolloutEngine(
        LetterCodec(),
        context_length=CONTEXT,
        kv_cache_bytes=64 << 20,
        engine_args={"max_num_seqs": 4},  # so that most of a request waits
        **options,
    ),
    "sglang": lambda **options: SGLangRolloutEngine(
        LetterCodec(),
        device="cpu",
        kv_cache_tokens=16 * CONTEXT,
        engine_args={"max-running-requests": 4},
        **options,
    ),
}
LONG = ARSamplingParams(temperature=1.0, max_new_tokens=CONTEXT - 8, seed=2)


@pytest.mark.parametrize("name", [marked("vllm"), nightly(marked("sglang"))])
def test_a_killed_instance_is_replaced_with_the_policy_and_its_samples_are_made_once(name, tmp_path):
    save_qwen3(tmp_path / "base")
    model = save_qwen3(tmp_path / "policy", seed=1)
    engine = START[name](
        model=str(tmp_path / "base"), python=engine_python(f"{name}-cpu"), dtype="fp32", num_instances=2
    )
    texts, found = [f"word {number % 6}" for number in range(48)], []
    try:
        receipt = push(engine, state(model), 3)
        assert (receipt.num_tensors, receipt.num_bound) == (25, 25 - 2 * 3)
        assert gap(engine, model) < TOLERANCE
        assert engine._proof is not None
        proof, first = engine._proof
        assert len(first.tokens[0]) == 8 and min(map(min, first.log_probs)) < -0.01 and len(proof.prompts) == 3
        thread = threading.Thread(target=lambda: found.append(engine.generate(request(texts, LONG))))
        thread.start()
        while engine._running is None and thread.is_alive():
            thread.join(0.01)
        pids = engine.pids
        os.killpg(pids[1], signal.SIGKILL)
        thread.join(400)
        track = found[0].tracks["text"]
        assert track.sample_ids == request(texts).sample_ids and track.policy_versions.tolist() == [3] * 48
        assert SegmentStatus.ABORTED not in track.segment.status.tolist()
        rows = zip(texts, track.segment.unpack("tokens"), track.segment.unpack("log_probs"), strict=True)
        for text, tokens, values in rows:
            expected = log_probs(model, letters(text), tokens.tolist(), LONG.temperature)
            assert float((expected - values).abs().max()) < TOLERANCE
        engine._pool.heal()
        assert engine._pool.num_restarts == 1 and engine.pids[0] == pids[0] and engine.pids[1] != pids[1]
        assert full_sync(engine, save_qwen3(tmp_path / "next", seed=2), 4)[1].push()["sync/logprob_gap_max"] < TOLERANCE
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", [marked(name) for name in START])
def test_a_push_cuts_texts_short_which_go_on_with_the_new_weights(name, tmp_path):
    models = {3: save_qwen3(tmp_path / "policy", seed=1), 4: save_qwen3(tmp_path / "next", seed=2)}
    save_qwen3(tmp_path / "base")
    engine = START[name](model=str(tmp_path / "base"), python=engine_python(f"{name}-cpu"), dtype="fp32")
    texts, found = [f"word {number % 6}" for number in range(160)], list[Any]()
    try:
        push(engine, state(models[3]), 3)
        thread = threading.Thread(target=lambda: found.append(engine.generate(request(texts, LONG))))
        thread.start()
        while engine._running is None and thread.is_alive():
            thread.join(0.01)
        thread.join(0.7)
        engine.abort()
        thread.join(400)
        (begun,) = found
        kept = begun.tracks["text"].segment.lengths.tolist()
        assert begun.num_unfinished > 0 and 0 < max(kept)
        push(engine, state(models[4]), 4)
        resp = engine.generate(request(texts, LONG), None, begun)
        track: Any = resp.tracks["text"]
        assert resp.num_unfinished == 0 and SegmentStatus.ABORTED not in track.segment.status.tolist()
        assert track.last_versions.tolist().count(4) == begun.num_unfinished
        parts = [track.segment.unpack(name) for name in ("tokens", "log_probs", "versions")]
        rows = zip(texts, kept, *parts, strict=True)
        for text, num_kept, tokens, values, versions in rows:
            assert versions.tolist() == [3] * num_kept + [4] * (len(tokens) - num_kept)
            of_policy = [log_probs(models[v], letters(text), tokens.tolist(), LONG.temperature) for v in (3, 4)]
            expected = of_policy[0].where(versions == 3, of_policy[1])
            assert float((expected - values).abs().max()) < TOLERANCE
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", [marked(name) for name in START])
def test_texts_fill_the_whole_context_and_go_on_where_one_token_is_left(name, tmp_path):
    save_qwen3(tmp_path / "base")
    engine = START[name](model=str(tmp_path / "base"), python=engine_python(f"{name}-cpu"), dtype="fp32")
    req = request([f"word {number:03d}" for number in range(40)], LONG)
    assert {len(text) for text in req.texts} == {CONTEXT - LONG.max_new_tokens}
    try:
        segment: Any = engine.generate(req).tracks["text"].segment
        rows = (segment.status == SegmentStatus.TRUNCATED).nonzero().flatten().tolist()
        assert rows
        for missing in range(1, 7):
            size = LONG.max_new_tokens - missing
            parts = {key: [own[:size] for own in segment.select(rows).unpack(key)] for key in ("tokens", "log_probs")}
            cut = TextSegment.pack(**parts, status=torch.full((len(rows),), SegmentStatus.ABORTED), params=LONG)
            own = req.select(rows)
            track = own.make_root_track(conditions={}, segment=cut, decoded=None)
            begun = RolloutResp(
                tracks={"text": track.replace(policy_versions=torch.zeros(len(rows), dtype=torch.long))}
            )
            found: Any = engine.generate(own, None, begun).tracks["text"].segment
            assert min(found.lengths) > size
            assert {int(status) for status in found.status} <= {SegmentStatus.COMPLETED, SegmentStatus.TRUNCATED}
    finally:
        engine.shutdown()
