"""Rules about devices: what a kind lacks is said once, with the device, the feature and what to do."""

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import machine_findings, run_findings
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.types.recipe import Machine

SHAPES, REPLICA = "worlds/shapes/flowgrpo", "worlds/shapes/replica"
APART = ["runtime=ray", "num_devices=2", "+placement.train=0", "+placement.rollout=1"]


def findings(name, *overrides):
    register_resolvers()
    return list(run_findings(run_of(resolve(compose(name, list(overrides))))))


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        (
            SHAPES,
            ["device=mps", "runtime=ray", "num_devices=2"],
            "device: mps (Apple GPU) has no collectives, which num_devices = 2 needs. Set num_devices: 1 and runtime: "
            "local, or another device.",
        ),
        (
            SHAPES,
            ["device=mps", "runtime=ray"],
            "device: mps (Apple GPU) has no Ray resource. Set runtime: local, or another device.",
        ),
        (
            SHAPES,
            ["device=mps", "+backend.fsdp.cpu_offload=true"],
            "device: mps (Apple GPU) has no collectives, which FSDP needs for backend.fsdp.cpu_offload. One device "
            "trains without FSDP if fsdp.cpu_offload is false: set it so, or another device.",
        ),
        (
            "worlds/arithmetic/vllm",
            ["device=mps"],
            "device: mps (Apple GPU) has no VLLMRolloutEngine, which engine names. Name an engine that samples where "
            "it trains (unirl.rollout.engine.trainside), or set device: cpu.",
        ),
        (
            REPLICA,
            [*APART, "device=npu", "+sync.transport=nccl"],
            "device: npu (Ascend NPU) has no groups for sync.transport = nccl. Set ray or files.",
        ),
    ],
)
def test_what_a_device_lacks_is_one_message(name, overrides, expected):
    assert findings(name, *overrides) == [expected]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (SHAPES, ["device=mps"]),
        (SHAPES, ["device=mps", "+backend.fsdp.param_dtype=bf16"]),
        (SHAPES, ["device=npu", "runtime=ray", "num_devices=2", "+backend.fsdp.param_dtype=bf16"]),
        (SHAPES, ["device=xpu", "runtime=ray", "num_devices=2"]),
        (REPLICA, [*APART, "device=xpu", "+sync.transport=ipc"]),
        (REPLICA, [*APART, "device=cuda", "+sync.transport=nccl"]),
        (REPLICA, [*APART, "+sync.transport=nccl"]),
    ],
)
def test_what_a_device_has_passes(name, overrides):
    assert findings(name, *overrides) == []


def test_fewer_devices_of_any_kind_than_a_run_needs_are_counted_by_their_name():
    register_resolvers()
    run = run_of(resolve(compose(SHAPES, ["device=npu", "runtime=ray", "num_devices=4"])))
    found = [each for each in machine_findings(run, Machine(num_cpus=8, num_gpus=2)) if "num_devices" in each]
    assert found == [
        "num_devices = 4 with device: npu, but this machine has 2 NPUs. Lower num_devices, set device: cpu, or join a "
        "cluster (cluster.address)."
    ]
