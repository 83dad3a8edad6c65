"""The real SGLang with a text model, fp32 on a CPU: samples, pushes, what is refused, what the canary finds."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from letters_model import CONTEXT, TOLERANCE, LetterCodec, gap, request, save_qwen3
from safetensors.torch import load_file, save_file
from test_vllm_weights import Disturbing, changed_elements_make_the_new_policy, full_sync, push, state

from unirl.rollout.engine.sglang_llm.engine import SGLangRolloutEngine
from unirl.rollout.engine.sglang_llm.instance import SGLangInstance
from unirl.types.errors import WeightSyncError
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder and model that the server starts with; its head is its embedding, as in most small models."""
    folder = tmp_path_factory.mktemp("tied")
    return folder, save_qwen3(folder, tied=True)


@pytest.fixture(scope="module")
def engine(sglang_python, model) -> Iterator[SGLangRolloutEngine]:
    """A server for all tests of this module, which the last one kills."""
    engine = SGLangRolloutEngine(
        LetterCodec(),
        model=str(model[0]),
        device="cpu",
        python=sglang_python,
        dtype="fp32",
        kv_cache_tokens=16 * CONTEXT,
    )
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_transformers_at_the_temperature_that_was_sampled_with(engine, model, temperature):
    assert gap(engine, model[1], ARSamplingParams(temperature=temperature, max_new_tokens=16)) < TOLERANCE


def test_samples_differ_end_at_the_stop_token_or_the_limit_and_carry_the_version(engine):
    track = engine.generate(request(["abc"] * 4)).tracks["text"]
    assert len({tuple(row.tolist()) for row in track.segment.unpack("tokens")}) == 4
    assert track.policy_versions.tolist() == [0] * 4
    prompts = ["xyz", "abc", "hello", "one", "two"]
    greedy = ARSamplingParams(temperature=0, max_new_tokens=6)
    segment = engine.generate(request(prompts, greedy)).tracks["text"].segment
    row = segment.status.tolist().index(SegmentStatus.TRUNCATED)
    tokens = segment.unpack("tokens")[row].tolist()
    assert len(tokens) == 6
    again = ARSamplingParams(temperature=0, max_new_tokens=6, stop_token_ids=(tokens[3],))
    stopped = engine.generate(request(prompts[row : row + 1], again)).tracks["text"].segment
    assert stopped.tokens.tolist() == tokens[: tokens.index(tokens[3]) + 1]
    assert stopped.status.tolist() == [SegmentStatus.COMPLETED]


def test_an_aborted_rollout_returns_what_it_has(engine):
    req = request(["abc"] * 16, ARSamplingParams(temperature=1.0, max_new_tokens=CONTEXT - 4, seed=1))
    found = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(req)))
    thread.start()
    while thread.is_alive():
        engine.abort()
        thread.join(0.05)
    segment = found[0].tracks["text"].segment
    assert segment.batch_size == 16 and SegmentStatus.ABORTED in segment.status.tolist()


def test_a_full_push_makes_the_server_the_new_policy(engine, tmp_path):
    other = save_qwen3(tmp_path, seed=1, tied=True)
    assert gap(engine, other) > 0.1
    receipt = push(engine, state(other), 3)
    assert gap(engine, other) < TOLERANCE
    # q, k and v are one parameter in SGLang, and so are gate and up: 3 fewer in each of the two layers.
    assert (receipt.policy_version, receipt.num_tensors, receipt.num_bound) == (3, 24, 24 - 2 * 3)
    assert engine.generate(request(["x"])).tracks["text"].policy_versions.tolist() == [3]


def test_a_tensor_that_is_lost_on_the_way_is_found_although_sglang_calls_the_push_a_success(
    engine, tmp_path, monkeypatch
):
    honest = SGLangInstance._keep
    lost = "model.layers.1.self_attn.o_proj.weight"

    def losing(instance, sent, bucket):
        honest(instance, sent, bucket)
        for path in instance._push_folder.glob("*.safetensors"):
            kept = {name: tensor for name, tensor in load_file(path).items() if name != lost}
            path.unlink()  # it is the trainer's file too
            save_file(kept, path, {"format": "pt"})

    other = save_qwen3(tmp_path, seed=2, tied=True)
    monkeypatch.setattr(SGLangInstance, "_keep", losing)
    with pytest.raises(WeightSyncError, match=rf"took no value \(1\):\n  {lost}"):
        push(engine, state(other), 4)
    with pytest.raises(WeightSyncError, match="push them again"):
        engine.generate(request(["x"]))
    monkeypatch.undo()
    push(engine, state(other), 4)
    assert gap(engine, other) < TOLERANCE


def test_the_canary_catches_a_weight_that_is_five_percent_off(engine, tmp_path):
    model = save_qwen3(tmp_path, seed=3, tied=True)
    disturbing = Disturbing(engine, "model.layers.1.mlp.down_proj.weight")
    with pytest.raises(WeightSyncError, match=r"does not have the trainer's policy of version 41: .* differ by up to"):
        full_sync(disturbing, model, 41)[1].push()
    metrics = full_sync(engine, model, 42)[1].push()
    assert metrics["sync/logprob_gap_max"] < TOLERANCE
    assert (metrics["sync/tensors"], metrics["sync/bound"]) == (24, 18)


def test_changed_elements_make_the_server_the_new_policy(engine, tmp_path):
    changed_elements_make_the_new_policy(engine, save_qwen3(tmp_path, seed=4, tied=True), 43)


def test_a_killed_server_is_replaced_with_the_policy_and_leaves_no_process(engine, tmp_path):
    model = save_qwen3(tmp_path, seed=4, tied=True)
    push(engine, state(model), 50)
    assert gap(engine, model) < TOLERANCE
    (pid,) = engine.pids
    os.killpg(pid, signal.SIGKILL)
    assert gap(engine, model) < TOLERANCE
    assert engine._pool.num_restarts == 1 and engine.pids != [pid]
    deadline = time.monotonic() + 60
    while living(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def living(group):
    """Ids of the processes of a group that have not ended; one that waits for its parent has."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended since it was listed
            state, _, own, *_ = stat.read_text().rpartition(")")[2].split()
            found += [stat.parent.name] if own == str(group) and state != "Z" else []
    return found
