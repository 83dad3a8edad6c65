"""Pushes between processes by every transport, and recipes whose engine has its own workers."""

import functools
import json
import os
import signal
import threading

import pytest
import torch
from pushed_weights import build_copy, build_training, make_sync, make_training, nudge

from unirl.config.runs import run_of
from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.group.start import GroupPlan, Push, start_groups
from unirl.tracking.jsonl import JsonlTracker
from unirl.trainer.build.assembly import make_trainer
from unirl.trainer.build.launch import make_runtime
from unirl.types.errors import WorkerError
from unirl.types.weights import tensor_checksum

TRANSPORTS = ("ray", "files", "ipc", "nccl")
OF_THE_MACHINE = ("timing_s/", "perf/", "sync/seconds", "reward/shapes/utilisation")

pytestmark = [pytest.mark.ray, pytest.mark.matrix]


def test_every_transport_crosses_between_processes_and_a_dead_engine_is_named(ray_of_two_cores, tmp_path):
    with RayRuntime(build_copy, num_devices=1, timeout_s=300, start_timeout_s=600) as rollouts:
        training = make_training()
        backend = training[1]
        options = {"canary_tolerance": 1e-6, "transfer_dir": str(tmp_path), "bucket_bytes": 400, "changed": "elements"}
        syncs = {transport: make_sync(training, transport, **options) for transport in TRANSPORTS}
        for sync in syncs.values():
            sync.connect_elsewhere(rollouts.remote_role("engine"))
            for num in (0, 1, 2):  # all, and twice what changed
                nudge(backend)
                metrics = sync.push()
                assert metrics["sync/logprob_gap_max"] == 0
                assert (metrics["sync/changed_elements"] == 1) == (num == 0)
                expected = {name: tensor_checksum(tensor) for name, tensor in backend.weight_source.weights()}
                assert rollouts.role("engine").checksums() == expected
        (process,) = rollouts._processes
        os.kill(process.pid, signal.SIGKILL)
        for sync in syncs.values():
            with pytest.raises(WorkerError, match=r"worker-0 \(rank 0 of 1, pid \d+\) failed:\n.*the process died"):
                sync.push()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("transport", "rollout"), [("ipc", 0), ("nccl", 1)])
def test_groups_on_one_device_or_two_push_by_what_they_share(ray_of_two_cores, transport, rollout, device):
    if device == "cuda" and torch.cuda.device_count() <= rollout:
        pytest.skip(f"needs {rollout + 1} CUDA devices")
    plans = [
        GroupPlan("train", functools.partial(build_training, transport), (0,)),
        GroupPlan("rollout", build_copy, (rollout,), roles=("engine",)),
    ]
    with start_groups(
        plans, num_devices=1 + rollout, device=device, timeout_s=300, pushes=[Push("rollout", "engine")]
    ) as groups:
        for _ in range(3):
            expected = groups.role("trainee").train()
            assert groups.role("sync").push()["sync/logprob_gap_max"] <= 1e-5
            assert groups.role("engine").checksums() == expected


def metrics_of(recipe, run_dir):
    """Every metric of a run but those of the machine, one record per line."""
    run_dir.mkdir()
    with make_runtime(run_of(recipe), run_dir) as runtime:
        make_trainer(run_of(recipe), runtime, run_dir, [JsonlTracker()], threading.Event()).run()
        assert runtime.num_held() == 0
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in each.items() if not key.startswith(OF_THE_MACHINE)} for each in records]


@pytest.mark.parametrize(
    "crossing", [*(f"+sync.transport={transport}" for transport in TRANSPORTS[1:]), "cluster.transport=rdt"]
)
def test_an_engine_apart_trains_to_the_bits_of_one_beside(recipe, ray_of_two_cores, tmp_path, crossing):
    words = ["num_rollouts=2", "stack.num_updates_per_batch=2", "+sync.bucket_bytes=2000000"]
    expected = metrics_of(recipe("worlds/shapes/replica", *words), tmp_path / "beside")
    apart = ["runtime=ray", "num_devices=2", "placement.train=0", "placement.rollout=1"]
    found = metrics_of(recipe("worlds/shapes/replica", *words, *apart, crossing), tmp_path / "apart")
    assert found == expected
