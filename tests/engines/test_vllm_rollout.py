"""Rollouts of the real vLLM against transformers, fp32 on a CPU."""

import threading

import pytest
import torch
from letters_model import CONTEXT, TOLERANCE, LetterCodec, gap, letters, request

from unirl.types.errors import ConfigError, WeightSyncError
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_transformers_at_the_temperature_that_was_sampled_with(engine, model, temperature):
    assert gap(engine, model[1], ARSamplingParams(temperature=temperature, max_new_tokens=16)) < TOLERANCE


def test_samples_of_one_prompt_differ_and_come_again_in_another_batch(engine):
    first = engine.generate(request(["abc"] * 4)).tracks["text"].segment.unpack("tokens")
    assert len({tuple(row.tolist()) for row in first}) == 4
    alone = engine.generate(request(["abc"] * 4).select([2])).tracks["text"].segment.unpack("tokens")
    assert torch.equal(first[2], alone[0])
    later = engine.generate(request(["abc"] * 4, rollout_id=1)).tracks["text"].segment.unpack("tokens")
    assert not torch.equal(first[0], later[0])


def test_a_sample_ends_with_its_stop_token_or_at_the_limit(engine):
    greedy = ARSamplingParams(temperature=0, max_new_tokens=6)
    prompts = ["xyz", "abc", "hello", "one", "two"]
    segment = engine.generate(request(prompts, greedy)).tracks["text"].segment
    assert segment.log_probs is None
    row = segment.status.tolist().index(SegmentStatus.TRUNCATED)
    tokens = segment.unpack("tokens")[row].tolist()
    assert len(tokens) == 6
    again = ARSamplingParams(temperature=0, max_new_tokens=6, stop_token_ids=(tokens[3],))
    stopped = engine.generate(request(prompts[row : row + 1], again)).tracks["text"].segment
    assert stopped.tokens.tolist() == tokens[: tokens.index(tokens[3]) + 1]
    assert stopped.status.tolist() == [SegmentStatus.COMPLETED]


def test_the_response_carries_conditions_texts_and_the_version_of_every_sample(engine):
    track = engine.generate(request(["ab", "c"])).tracks["text"]
    assert [row.tolist() for row in track.conditions["prompt"].unpack("tokens")] == [letters("ab"), letters("c")]
    assert track.decoded.texts == LetterCodec().decode(track.segment).texts
    assert track.policy_versions.tolist() == [0, 0]
    assert track.sample_ids == ["s0", "s1"]


def test_truncated_sampling_gives_the_log_probs_of_what_was_drawn_from(engine):
    top = ARSamplingParams(temperature=1.0, top_k=1, max_new_tokens=4)
    assert engine.generate(request(["ab"], top)).tracks["text"].segment.log_probs.abs().max() < TOLERANCE


def test_an_aborted_rollout_returns_what_it_has(engine):
    long = ARSamplingParams(temperature=1.0, max_new_tokens=CONTEXT - 4, seed=1)
    req = request(["abc"] * 64, long)
    found = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(req)))
    thread.start()
    while thread.is_alive():
        engine.abort()
        thread.join(0.05)
    segment = found[0].tracks["text"].segment
    assert segment.batch_size == 64
    assert SegmentStatus.ABORTED in segment.status.tolist()
    assert engine.generate(request(["abc"])).tracks["text"].segment.status.tolist() != [SegmentStatus.ABORTED]


def test_prompts_that_do_not_fit_and_policies_that_were_not_pushed_are_refused(engine):
    with pytest.raises(ConfigError, match=f"prompt 0 has 120 tokens .* context of {CONTEXT}"):
        engine.generate(request(["x" * 120]))
    engine.check_prompts(request(["x" * 100]))
    with pytest.raises(ConfigError, match="prompt 1 has 120 tokens"):
        engine.check_prompts(request(["x", "x" * 120]))
    with pytest.raises(WeightSyncError, match="samples of the policy 'ema' are asked for. Push it first."):
        engine.generate(request(["x"]), policy="ema")
