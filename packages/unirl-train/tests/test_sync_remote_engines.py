"""Pushes from the workers that train to engines in other workers: through Ray, with no memory or file in common."""

import os
import signal
from typing import Any

import pytest
from sync_fakes import OneWeightPipeline, RememberingEngine, build_engine, first_weight
from train_fakes import make_backend

from unirl.distributed.group.framework import ray_module
from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.distributed.weight_sync.lora import LoraWeightSync
from unirl.distributed.weight_sync.remote_engines import RemoteEngines
from unirl.distributed.weight_sync.transports.base import Parcel
from unirl.train.configs import LoraConfig
from unirl.types.errors import WeightSyncError, WorkerError
from unirl.types.sampling import ARSamplingParams
from unirl.types.weights import tensor_checksum


@pytest.fixture(scope="module")
def rollouts(ray_of_two_cores):
    """A worker with an engine, killed by the last test that uses it."""
    with RayRuntime(build_engine, num_devices=1, timeout_s=120, start_timeout_s=600) as runtime:
        yield runtime


def sync_to(target, kind=FullWeightSync, **options):
    """A backend of random weights and its sync; the canary compares one weight."""
    backend = make_backend(lora=LoraConfig(rank=2, alpha=4) if kind is LoraWeightSync else None)
    source = backend.weight_source
    read = source.adapter_weights if kind is LoraWeightSync else lambda: dict(source.weights())
    pipeline: Any = OneWeightPipeline(lambda: first_weight(read()))
    sampling = ARSamplingParams(temperature=1.0)
    sync = kind(backend, None, pipeline, sampling=sampling, dtype="fp32", canary_tolerance=1e-6, **options)
    sync.connect(target)
    return backend, sync


def elsewhere(rollouts):
    """The target as it arrives in the worker that pushes."""
    ray = ray_module()
    return ray.get(ray.put(RemoteEngines(rollouts.remote_role("engine"))))


def checksums(tensors):
    return {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


@pytest.mark.ray
def test_the_policy_crosses_to_an_engine_in_another_process_byte_for_byte(rollouts):
    backend, sync = sync_to(elsewhere(rollouts), bucket_bytes=500)
    sync.prepare()
    metrics = sync.push()
    assert metrics["sync/logprob_gap_max"] == 0
    assert rollouts.role("probe").pid() != os.getpid()
    assert rollouts.role("probe").checksums() == checksums(dict(backend.weight_source.weights()))


@pytest.mark.ray
def test_an_adapter_crosses_alone(rollouts):
    backend, sync = sync_to(elsewhere(rollouts), LoraWeightSync)
    sync.push()
    assert rollouts.role("probe").checksums() == checksums(backend.weight_source.adapter_weights())


@pytest.mark.ray
def test_what_an_engine_elsewhere_refuses_stops_the_push_and_leaves_both_sides_alive(rollouts):
    target = elsewhere(rollouts)
    _, sync = sync_to(target)
    target.begin_weights(7, [])
    target.finish_weights(7)
    with pytest.raises(WeightSyncError, match="version 0 is older than the engine's 7"):
        sync.push()
    assert rollouts.role("probe").pid()


@pytest.mark.ray
def test_an_engine_elsewhere_that_dies_is_named(rollouts):
    target = elsewhere(rollouts)
    _, sync = sync_to(target)
    os.kill(rollouts.role("probe").pid(), signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker-0 \(rank 0 of 1, pid \d+\) failed:\n.*the process died"):
        sync.push()


# Several engines, without processes


class TwoEngines:
    """Stands for a RemoteRole of two workers."""

    workers = ("rollouts-0", "rollouts-1")

    def __init__(self) -> None:
        self.engines = [RememberingEngine(read=first_weight), RememberingEngine(read=first_weight)]

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.submit(method, *args)()

    def submit(self, method: str, *args: Any) -> Any:
        opened = [value.opened({}) if isinstance(value, Parcel) else value for value in args]
        return lambda: [getattr(engine, method)(*opened) for engine in self.engines]


def test_every_engine_elsewhere_gets_the_policy_and_faces_the_canary():
    role: Any = TwoEngines()
    _, sync = sync_to(RemoteEngines(role))
    assert sync.is_due
    sync.push()
    assert not sync.is_due
    assert [engine.policy_version for engine in role.engines] == [0, 0]
    role.engines[1].read = lambda tensors: first_weight(tensors) + 0.5
    with pytest.raises(WeightSyncError, match=r"differ by up to 0\.5 nats .* for 'The quick brown fox'"):
        sync.push()


def test_engines_that_took_different_weights_are_told_apart():
    role: Any = TwoEngines()
    role.engines[1].num_tensors_off = -1
    with pytest.raises(WeightSyncError, match=r"engines took different weights\. rollouts-0: .*; rollouts-1: "):
        sync_to(RemoteEngines(role))[1].push()
