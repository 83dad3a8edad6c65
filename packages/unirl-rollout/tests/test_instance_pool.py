"""Pools of engine processes: calls go to the least busy, and none is lost or answered twice if processes are killed."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from linear_server import CODEC
from rollout_fakes import LinearPipeline, request
from rollout_fakes import engine as direct_engine
from safetensors.torch import save_file

from unirl.rollout.engine.child.devices import dealt_gpus
from unirl.rollout.engine.child.options import EngineProcesses
from unirl.rollout.engine.served_latents.call import LATENTS, SampledLatents
from unirl.rollout.engine.served_latents.engine import ServedLatentsEngine
from unirl.types.errors import ConfigError, WeightSyncError
from unirl.types.media import Modality
from unirl.types.weights import WeightBucket, weight_buckets, weight_spec


class LinearEngine(ServedLatentsEngine):
    """The trainer's side of `linear_server`."""

    codec = CODEC
    module = "linear_server"
    versions = ("1.0",)
    kernels = {"flow": "flow"}

    def __init__(self, num_instances, **options):
        pipeline: Any = LinearPipeline()
        self._pipeline = pipeline
        self._forward_batch_size = 2
        self._track, self._modality, self._dtype = "image", Modality.IMAGE, torch.float32
        self._drops_text_encoders = False
        self._launch(
            EngineProcesses(model="linear", num_instances=num_instances),
            {"seconds_per_call": 0.0, **options},
            {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
            None,
        )

    def _inputs(self, conditions, start, params):
        return {LATENTS: start}

    def _latents(self, stored, shape):
        return stored

    def _layout(self, params):
        return {}

    def _check_ready(self, answer, pid):
        pass


WEIGHTS = {"a": torch.tensor(-0.7), "b": torch.tensor(0.3)}


def push(engine, version, weights=WEIGHTS):
    """Push two numbers in two buckets."""
    buckets = list(weight_buckets(weights.items(), policy_version=version, max_bytes=4))
    engine.begin_weights(version, [spec for bucket in buckets for spec in bucket.specs])
    for bucket in buckets:
        engine.receive_weights(bucket)
    return engine.finish_weights(version)


def expected_track(req, weights=WEIGHTS):
    """What direct sampling with these weights gives."""
    pipeline: Any = LinearPipeline()
    pipeline.a, pipeline.b = weights["a"], weights["b"]
    return direct_engine(pipeline=pipeline).generate(req).tracks["image"]


def assert_same(track, req, version, weights=WEIGHTS):
    """Every sample once, in its place, of the pushed version, bit for bit."""
    expected = expected_track(req, weights)
    assert track.sample_ids == req.sample_ids
    assert torch.equal(track.segment.latents, expected.segment.latents)
    assert torch.equal(track.segment.sde_logp, expected.segment.sde_logp)
    assert torch.equal(track.decoded.pixels, expected.decoded.pixels)
    assert track.policy_versions.tolist() == [version] * req.batch_size


def test_a_killed_process_is_replaced_with_the_present_weights_and_no_sample_is_lost(tmp_path):
    engine = LinearEngine(2, die_once=str(tmp_path / "died"), seconds_per_call=0.02)
    try:
        assert push(engine, 4).num_bound == 2
        engine.generate(request(num=2))  # as the canary of the push
        before = engine.pids
        req = request(num=16)
        assert_same(engine.generate(req).tracks["image"], req, 4)
        assert (tmp_path / "died").exists()
        engine._pool.heal()
        assert engine._pool.num_restarts == 1 and len(set(before) & set(engine.pids)) == 1
        assert_same(engine.generate(req).tracks["image"], req, 4)
        with pytest.raises(WeightSyncError, match="unknown: c"):
            push(engine, 5, {**WEIGHTS, "c": torch.tensor(0.0)})
        assert_same(engine.generate(req).tracks["image"], req, 4)  # what does not fit changes nothing
    finally:
        engine.shutdown()
    assert not engine._folder.exists()


def push_changes(engine, version, base, weights):
    """Push what changed of two numbers since version `base`: of `a` its one element, of `b` nothing."""
    element = torch.cat([torch.tensor([1, 0], dtype=torch.uint8), weights["a"].view(1).view(torch.uint8)])
    specs = tuple(weight_spec(name, tensor) for name, tensor in weights.items())
    engine.begin_weights(version, specs)
    engine.receive_weights(WeightBucket(version, {"a": element}, (), specs, base))
    return engine.finish_weights(version)


def test_processes_take_what_changed_and_one_that_starts_later_takes_all():
    engine = LinearEngine(2)
    changed = {**WEIGHTS, "a": torch.tensor(-0.4)}
    req = request(num=8)
    try:
        with pytest.raises(WeightSyncError, match="changed since version 4, but the engine has version 0; push again"):
            push_changes(engine, 5, 4, changed)
        push(engine, 4)
        receipt = push_changes(engine, 5, 4, changed)
        assert (receipt.num_tensors, receipt.num_bound, receipt.num_bytes) == (2, 2, 6)
        assert_same(engine.generate(req).tracks["image"], req, 5, changed)
        os.kill(engine.pids[0], signal.SIGKILL)
        assert_same(engine.generate(req).tracks["image"], req, 5, changed)
        engine._pool.heal()
        assert engine._pool.num_restarts == 1
        os.kill(engine.pids[1], signal.SIGKILL)  # so that the new one samples
        assert_same(engine.generate(req).tracks["image"], req, 5, changed)
        wrong = {"a": torch.tensor(-0.1), "b": torch.tensor(9.0)}  # which the push does not bring
        with pytest.raises(WeightSyncError, match="weights arrived changed: expected"):
            push_changes(engine, 6, 5, wrong)
        assert_same(engine.generate(req).tracks["image"], req, 5, changed)
        with pytest.raises(WeightSyncError, match="since version 5, which the engine has no files of; push again"):
            push_changes(engine, 6, 5, changed)
        assert push(engine, 6).num_bytes == 8
        assert_same(engine.generate(req).tracks["image"], req, 6)
    finally:
        engine.shutdown()


@pytest.mark.matrix
@pytest.mark.nightly  # that of a pool of texts is in every run
def test_twenty_processes_of_three_are_killed_at_random_and_every_sample_is_there_once():
    engine = LinearEngine(3, seconds_per_call=0.1)
    random_kills, killed, stop = random.Random(0), [], threading.Event()

    def kill():
        """Kill an instance that has loaded, at a random time, until twenty are dead; after the tenth its successor too,
        while that loads."""
        while len(killed) < 21 and not stop.is_set():
            time.sleep(random_kills.uniform(0.1, 1.0))
            instance: Any = random_kills.choice(engine._pool._members)
            pid = instance.pid
            if pid in killed or instance._ready is None:
                continue
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            if len(killed) == 10:
                while instance.pid == pid and not stop.is_set():
                    time.sleep(0.001)
                killed.append(instance.pid)
                os.kill(instance.pid, signal.SIGKILL)

    try:
        engine.wait_until_ready()
        killer = threading.Thread(target=kill)
        killer.start()
        version = 0
        while killer.is_alive() or version == 0:
            version += 1
            weights = {name: value * (1 + version % 10 / 10) for name, value in WEIGHTS.items()}
            push(engine, version, weights)
            for num in (2, 96):
                req = request(num=num)
                assert_same(engine.generate(req).tracks["image"], req, version, weights)
        killer.join()
        engine._pool.heal()
        assert len(set(killed)) == 21 and engine._pool.num_restarts == 21
        for pid in killed:
            assert pid not in engine.pids
    finally:
        stop.set()
        engine.shutdown()


def test_an_instance_that_samples_otherwise_is_refused(tmp_path):
    engine: Any = ServedLatentsEngine.__new__(LinearEngine)
    engine._dtype = torch.float32
    latents = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    engine._proof = SimpleNamespace(path="request"), (None, {LATENTS: latents})

    def answering(found):
        path = tmp_path / "answer.safetensors"

        def call(message):
            save_file({LATENTS: found}, path)
            return SampledLatents(1, str(path))

        return SimpleNamespace(call=call, name="Linear (pid 7)")

    engine._prove(answering(latents + 1e-6))
    for wrong in (latents + 1e-3, latents * torch.nan):
        with pytest.raises(WeightSyncError, match=r"other samples than those that Linear \(pid 7\) takes the place"):
            engine._prove(answering(wrong))


# Devices


def test_gpus_are_dealt_to_the_instances():
    assert dealt_gpus("cpu", 2, 1, None) == [{}, {}]
    assert dealt_gpus("npu", 2, 1, [1, 0]) == [{"ASCEND_RT_VISIBLE_DEVICES": "1"}, {"ASCEND_RT_VISIBLE_DEVICES": "0"}]
    assert dealt_gpus("cuda", 1, 2, None) == [{}]  # all that this process sees
    names = [each["CUDA_VISIBLE_DEVICES"] for each in dealt_gpus("cuda", 2, 2, [4, 5, 7, 6])]
    assert names == ["4,5", "7,6"]
    with pytest.raises(ConfigError, match=r"3 \* 2 = 6 GPUs are needed, engine.gpus = None. Name as many GPUs"):
        dealt_gpus("cuda", 3, 2, None)
    with pytest.raises(ConfigError, match=r"2 \* 1 = 2 GPUs are needed, engine.gpus = \[0, 1, 2\]"):
        dealt_gpus("cuda", 2, 1, [0, 1, 2])
    with pytest.raises(ConfigError, match=r"engine.gpus = \[0\] does nothing on a CPU"):
        dealt_gpus("cpu", 1, 1, [0])
