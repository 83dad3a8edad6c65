"""Several processes of a text engine: calls by load, and nothing is lost or made twice where they are killed."""

import os
import random
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from number_server import CODEC, CONTEXT, HELD, VOCABULARY, Writer
from safetensors.torch import save_file
from text_fakes import NumberCodec

from unirl.rollout.engine.child.options import EngineProcesses
from unirl.rollout.engine.served_text.call import (
    Generate,
    Generations,
    Limits,
    generation,
    joined,
    largest_gap,
    part_of,
    parts,
    proof_of,
)
from unirl.rollout.engine.served_text.engine import ServedTextEngine
from unirl.rollout.engine.sglang_llm.engine import SGLangRolloutEngine
from unirl.rollout.engine.sglang_llm.response import checksums
from unirl.types.errors import ContractError, WeightSyncError
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus
from unirl.types.weights import weight_buckets

# Calls, cut and joined


@pytest.mark.parametrize(
    ("groups", "num_instances", "expected"),
    [
        ([4] * 4, 1, [16]),
        ([4] * 64, 2, [8] * 32),  # 16 for each
        ([8] * 4, 1, [32]),
        ([8] * 4, 2, [1] * 32),  # fewer groups than calls are cut
        ([100], 2, [100 // 25] * 25),
        ([40, 1, 1, 40], 4, [2] * 20 + [2] + [2] * 20),
        ([1], 3, [1]),
    ],
)
def test_a_request_is_cut_into_whole_groups_unless_they_are_few(groups, num_instances, expected):
    ids = [f"g{group}" for group, size in enumerate(groups) for _ in range(size)]
    found = parts(ids, num_instances)
    assert [row for rows in found for row in rows] == list(range(len(ids)))
    assert [len(rows) for rows in found] == expected


CALL = Generate(
    number=7,
    prompts=[[1], [2, 3], [4], [5]],
    seeds=[10, 11, 12, 13],
    temperature=0.7,
    top_p=0.9,
    top_k=3,
    max_new_tokens=40,
    stop_token_ids=[0],
    pictures=["a", "b", "c"],
    shown=[[0], [1, 2], [], [1]],
    placeholder=9,
)


def test_a_part_of_a_call_has_its_rows_and_the_pictures_that_they_show():
    part = part_of(CALL, range(1, 4), 8)
    assert (part.number, part.prompts, part.seeds) == (8, CALL.prompts[1:], CALL.seeds[1:])
    assert (part.pictures, part.shown) == (["b", "c"], [[0, 1], [], [0]])
    assert (part_of(CALL, range(2, 3), 8).pictures, part_of(CALL, range(2, 3), 8).shown) == ([], [])
    assert part_of(CALL, range(4), 7) == CALL
    answers = [Generations(3, [[1], [2]], [[-0.1], [-0.2]], ["stop", "length"]), Generations(3, [[]], [[]], ["abort"])]
    assert joined(answers) == Generations(3, [[1], [2], []], [[-0.1], [-0.2], []], ["stop", "length", "abort"])


def test_instances_are_compared_by_most_probable_tokens_up_to_where_rounding_decides():
    proof = proof_of(CALL)
    assert (proof.temperature, proof.top_p, proof.top_k, proof.max_new_tokens) == (0.0, 1.0, 0, 8)
    assert proof.prompts == CALL.prompts and proof.number > 10**9
    expected = Generations(3, [[1, 2, 3], [4]], [[-0.5, -0.5, -0.1], [-0.2]], ["length"] * 2)
    assert largest_gap(expected, expected) == 0
    tie = replace(expected, tokens=[[1, 7, 8], [4]], log_probs=[[-0.5, -0.501, -3.0], [-0.2]])
    assert largest_gap(tie, expected) == pytest.approx(0.001)
    other = replace(expected, log_probs=[[-0.5, -0.5, -0.1], [-0.9]])
    assert largest_gap(other, expected) == pytest.approx(0.7)
    assert not largest_gap(replace(expected, log_probs=[[float("nan")] * 3, [-0.2]]), expected) <= 1
    assert largest_gap(replace(expected, tokens=[[1]]), expected) == float("inf")


# Real processes


class NumberEngine(ServedTextEngine):
    """The trainer's side of `number_server`."""

    codec = CODEC
    module = "number_server"
    versions = ("1.0",)

    def __init__(self, num_instances, control, seconds_per_step=0.0):
        pipeline: Any = NumberCodec()
        self._pipeline, self._track = pipeline, "text"
        self._launch(
            EngineProcesses(model="numbers", num_instances=num_instances),
            {"max_running": 4, "control": str(control), "seconds_per_step": seconds_per_step},
            {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
            None,
        )

    def _limits(self):
        return Limits(CONTEXT, VOCABULARY)

    def _dtype_name(self):
        return self.ready().dtype

    def _max_running(self):
        return self.ready().max_running

    def _check_ready(self, answer, pid):
        pass


@dataclass(frozen=True)
class Repaint:
    """A message that no engine has."""


WEIGHTS = {"a": torch.tensor(2.0), "b": torch.tensor(-1.5)}
PARAMS = ARSamplingParams(temperature=0.7, max_new_tokens=24, seed=5)


def asking(num_prompts, num_samples, rollout_id=0):
    """Several samples of each of some prompts."""
    rows = [(prompt, sample) for prompt in range(num_prompts) for sample in range(num_samples)]
    return RolloutReq(
        sample_ids=[f"p{prompt}/s{sample}" for prompt, sample in rows],
        group_ids=[f"p{prompt}" for prompt, _ in rows],
        primitives={"text": Texts(texts=[f"1 {prompt % VOCABULARY}" for prompt, _ in rows])},
        sampling_params=PARAMS,
        rollout_id=rollout_id,
    )


def push(engine, version, weights=WEIGHTS):
    buckets = list(weight_buckets(weights.items(), policy_version=version, max_bytes=4))
    engine.begin_weights(version, [spec for bucket in buckets for spec in bucket.specs])
    for bucket in buckets:
        engine.receive_weights(bucket)
    return engine.finish_weights(version)


def assert_same(track, req, version, weights=WEIGHTS):
    """Every sample once, in its place, of the pushed version, as one process writes it."""
    codec: Any = NumberCodec()
    call = generation(req, codec.encode(req.primitives, PARAMS), codec.stop_token_ids(PARAMS), 0)
    assert track.sample_ids == req.sample_ids
    tokens, log_probs = track.segment.unpack("tokens"), track.segment.unpack("log_probs")
    for row in range(req.batch_size):
        writer = Writer(call, row, weights)
        while writer.reason is None:
            writer.write()
        assert tokens[row].tolist() == writer.tokens
        assert torch.equal(log_probs[row], torch.tensor(writer.log_probs))
    assert track.policy_versions.tolist() == [version] * req.batch_size


@pytest.fixture(scope="module")
def control(tmp_path_factory):
    """Folder of the files that steer the processes of `engine`."""
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def engine(control):
    """Two processes, at version 0 before anything is pushed."""
    engine = NumberEngine(2, control)
    yield engine
    engine.shutdown()
    assert not engine._folder.exists()


def test_a_killed_process_is_replaced_with_the_present_weights_and_no_sample_is_lost(engine, control):
    assert push(engine, 4).num_bound == 2
    engine.generate(asking(2, 2))  # as the canary of the push
    before, num_restarts = engine.pids, engine._pool.num_restarts
    (control / "die").touch()
    req = asking(8, 4)
    assert_same(engine.generate(req).tracks["text"], req, 4)
    assert not (control / "die").exists()
    engine._pool.heal()
    assert engine._pool.num_restarts == num_restarts + 1 and len(set(before) & set(engine.pids)) == 1
    again = asking(8, 4, rollout_id=1)
    assert_same(engine.generate(again).tracks["text"], again, 4)
    with pytest.raises(WeightSyncError, match="unknown: c"):
        push(engine, 5, {**WEIGHTS, "c": torch.tensor(0.0)})
    assert_same(engine.generate(req).tracks["text"], req, 4)  # what does not fit changes nothing
    others = {"a": torch.tensor(1.0), "b": torch.tensor(3.0)}
    push(engine, 5, others)
    assert_same(engine.generate(req).tracks["text"], req, 5, others)


def test_a_push_that_no_process_survives_is_taken_by_those_in_their_place(engine):
    others = {"a": torch.tensor(0.5), "b": torch.tensor(2.0)}
    buckets = list(weight_buckets(others.items(), policy_version=6, max_bytes=4))
    engine.begin_weights(6, [spec for bucket in buckets for spec in bucket.specs])
    engine.receive_weights(buckets[0])
    for pid in engine.pids:
        os.kill(pid, signal.SIGKILL)
    engine.receive_weights(buckets[1])
    receipt = engine.finish_weights(6)
    assert (receipt.policy_version, receipt.num_tensors, receipt.num_bound) == (6, 2, 2)
    req = asking(4, 4)
    assert_same(engine.generate(req).tracks["text"], req, 6, others)


@pytest.mark.parametrize("num_killed", [0, 1])
def test_an_abort_ends_what_runs_and_what_waits_also_where_a_process_has_died(engine, control, num_killed):
    engine.wait_until_ready()
    req, found = asking(6, 4), []

    def generate():
        found.append(engine.generate(req).tracks["text"])

    (control / "hold").touch()
    thread = threading.Thread(target=generate)
    thread.start()
    wait_until(lambda: all((control / str(pid)).exists() for pid in engine.pids) or not thread.is_alive())
    for pid in engine.pids[:num_killed]:
        os.kill(pid, signal.SIGKILL)
    engine.abort()
    thread.join(120)
    for path in control.iterdir():
        path.unlink()
    track = found.pop()
    assert track.sample_ids == req.sample_ids
    endings = zip(track.segment.lengths.tolist(), track.segment.status.tolist(), strict=True)
    # Some samples end within two tokens; of the others at most eight run, four in each process, and the rest wait.
    lengths = [length for length, status in endings if status == SegmentStatus.ABORTED]
    assert max(lengths) == HELD and len(lengths) - lengths.count(0) <= 8 <= lengths.count(0)
    engine._pool.heal()
    assert engine._aborted is not None and engine.generate(req).tracks["text"].segment.batch_size == req.batch_size


def test_what_an_abort_ended_goes_on_after_a_push_with_the_rest_of_its_tokens(engine, control):
    engine.wait_until_ready()
    req, found = asking(6, 4), []
    (control / "hold").touch()
    thread = threading.Thread(target=lambda: found.append(engine.generate(req)))
    thread.start()
    wait_until(lambda: all((control / str(pid)).exists() for pid in engine.pids) or not thread.is_alive())
    engine.abort()
    thread.join(120)
    for path in control.iterdir():
        path.unlink()
    begun = found.pop()
    former = begun.tracks["text"]
    assert former.is_unfinished.any() and former.last_versions is None and begun.num_unfinished > 0
    old = engine.policy_version
    push(engine, old + 1)
    resp = engine.generate(req, None, begun)
    track = resp.tracks["text"]
    assert resp.num_unfinished == 0 and track.sample_ids == req.sample_ids
    assert set(track.segment.status.tolist()) <= {SegmentStatus.COMPLETED, SegmentStatus.TRUNCATED}
    rows = zip(*(track.segment.unpack(name) for name in ("tokens", "log_probs", "versions")), strict=True)
    for row, (tokens, log_probs, versions) in enumerate(rows):
        kept = former.segment.unpack("tokens")[row]
        assert torch.equal(tokens[: len(kept)], kept)
        assert torch.equal(log_probs[: len(kept)], former.segment.unpack("log_probs")[row])
        assert versions.tolist() == [old] * len(kept) + [old + 1] * (len(tokens) - len(kept))
        is_whole = not former.is_unfinished[row]
        assert is_whole == (len(tokens) == len(kept))
        assert int(track.policy_versions[row]) == (old if len(kept) else old + 1)
        assert int(track.last_versions[row]) == (old if is_whole else old + 1)
    again = engine.generate(req, None, resp)  # nothing is left to do
    assert again.tracks["text"].segment.equals(track.segment)


def test_a_message_that_the_process_does_not_know_is_an_error_and_no_silence(tmp_path):
    engine = NumberEngine(1, tmp_path)
    engine.wait_until_ready()
    (member,) = engine._pool.members
    with pytest.raises(ContractError, match=r"no message of this protocol .*Install the same unirl-rollout"):
        member.call(Repaint())
    assert member.is_alive and engine.generate(asking(1, 1)).batch_size == 1
    engine.shutdown()


def wait_until(holds, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.matrix
def test_twenty_processes_of_three_are_killed_at_random_and_every_sample_is_there_once(tmp_path):
    engine = NumberEngine(3, tmp_path, seconds_per_step=0.002)  # four deaths of one call would end the run
    random_kills, killed, stop = random.Random(0), list[int](), threading.Event()

    def kill():
        """Kill a process that has loaded, at a random time, until twenty are dead."""
        while len(killed) < 20 and not stop.wait(random_kills.uniform(0.3, 1.2)):
            instance: Any = random_kills.choice(engine._pool._members)
            if instance.pid not in killed and instance._ready is not None:
                killed.append(instance.pid)
                os.kill(killed[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    try:
        engine.wait_until_ready()
        killer.start()
        version = 0
        while killer.is_alive():
            version += 1
            weights = {name: value * (1 + version % 10 / 10) for name, value in WEIGHTS.items()}
            assert push(engine, version, weights).num_bound == 2
            for num_prompts in (1, 12):
                req = asking(num_prompts, 8, rollout_id=version)
                assert_same(engine.generate(req).tracks["text"], req, version, weights)
            assert version < 1000
        # The last one may not be known to be dead yet.
        wait_until(lambda: not any(each.is_alive for each in engine._pool.members if each.pid in killed))
        engine._pool.heal()
        assert len(set(killed)) == 20 and engine._pool.num_restarts == 20
        assert not set(killed) & set(engine.pids)
    finally:
        stop.set()
        engine.shutdown()
        killer.join()


def test_a_killed_server_is_replaced_with_the_present_weights_and_no_sample_is_lost(tmp_path, monkeypatch):
    """For SGLang, with fake servers as processes."""
    model = tmp_path / "model"
    model.mkdir()
    weights = {"a": torch.zeros(2), "b": torch.ones(3)}
    save_file(weights, model / "model.safetensors")
    (model / "config.json").write_text('{"tie_word_embeddings": false}')
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "fake_sglang"))
    monkeypatch.setenv("FAKE_CONTROL", str(tmp_path))
    codec: Any = NumberCodec()
    engine = SGLangRolloutEngine(
        codec,
        model=str(model),
        device="cuda",
        dtype="fp32",
        context_length=CONTEXT,
        vocab_size=99,
        num_instances=2,
        gpus=[0, 1],
    )
    try:
        receipt = push(engine, 3, {name: value + 5 for name, value in weights.items()})
        assert (receipt.num_tensors, receipt.num_bound) == (2, 2)
        (tmp_path / "die").touch()
        before, req = engine.pids, asking(8, 4)
        track: Any = engine.generate(req).tracks["text"]
        assert not (tmp_path / "die").exists()
        assert track.sample_ids == req.sample_ids and track.policy_versions.tolist() == [3] * 32
        for prompt, tokens in zip(req.primitives["text"].texts, track.segment.unpack("tokens"), strict=True):
            last = int(prompt.split()[-1])
            assert tokens.tolist() == list(range(last + 1, 10 if last < 9 else last + 25))  # it counts, to 9 or on
        engine._pool.heal()
        assert engine._pool.num_restarts == 1 and len(set(before) & set(engine.pids)) == 1
        servers: Any = engine._pool._members
        first, second = [checksums(each._check_weights("checksum")) for each in servers]
        assert first == second
    finally:
        engine.shutdown()
    assert not engine._folder.exists()


def test_an_instance_that_writes_otherwise_is_refused():
    engine: Any = ServedTextEngine.__new__(NumberEngine)
    engine._dtype_name = lambda: "torch.float32"
    expected = Generations(1, [[1, 2]], [[-0.1, -0.2]], ["length"])
    engine._proof = "proof", expected

    def answering(log_probs):
        found = replace(expected, log_probs=[log_probs])
        return SimpleNamespace(call=lambda message: found, name="Numbers (pid 7)")

    engine._prove(answering([-0.1, -0.200001]))
    for wrong in ([-0.1, -0.201], [float("nan"), -0.2]):
        with pytest.raises(WeightSyncError, match=r"other samples than those that Numbers \(pid 7\) takes the place"):
            engine._prove(answering(wrong))
