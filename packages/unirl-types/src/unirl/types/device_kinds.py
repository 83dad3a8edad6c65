"""The kinds of devices and what each offers. No other module names one; needs no torch, so that rules can ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from unirl.types.errors import ConfigError

DeviceName = Literal["cpu", "cuda", "npu", "xpu", "mps"]
"""Devices of a run, by torch's names."""

DeviceChoice = Literal["auto", "cpu", "cuda", "npu", "xpu", "mps"]
"""Devices as recipes name them; `auto` becomes one of `DeviceName` when a command starts. Written out: recipes are
checked by the source of a type."""

PRETEND = "pretend"
"""Device type of a rehearsal: its tensors have shapes, dtypes and a device, but no values, and nothing is computed."""

CPU: DeviceName = "cpu"

ACCELERATOR = "accelerator"
"""Stands for the kind of accelerator that the process that gets it finds."""

USUAL: DeviceName = "cuda"
"""Device of a recipe that leaves it open where this machine cannot tell: in a rehearsal, and on a cluster elsewhere."""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """What UniRL may use of one kind of device."""

    name: str
    """Torch's device type."""
    hardware: str
    """As messages name it."""
    is_accelerator: bool = True
    """True for memory separate from the host's."""
    extension: str | None = None
    """Distribution that torch needs besides itself."""
    has_many: bool = True
    """True if a run may use several: tensors on it take part in collectives, and Ray can reserve it."""
    collectives: str = "gloo"
    """Backend of torch.distributed for tensors on it."""
    ray_resource: str | None = None
    """Ray's name of the resource; None: the worker is reserved by its cores alone."""
    visible: str | None = None
    """Environment variable with the devices that a process sees."""
    files: str | None = None
    """Pattern of the device files in /dev, one per device; None where files do not tell how many there are."""
    shares_memory: bool = False
    """True if a process can map memory of the device that another process has allocated (IPC handles)."""
    broadcasts: bool = False
    """True if groups that only push weights can be formed on it."""
    has_ragged_attention: bool = False
    """True if torch's `varlen_attn` runs on it."""
    block_attention: Literal["host", "fused"] | None = None
    """Torch's attention on it that gives the sums by which blocks of keys add up: what a ring of ranks needs."""
    has_float64: bool = True
    counts_memory: bool = True
    """True if torch.accelerator tells how much of its memory is allocated."""
    has_engines: bool = True
    """True if engines in separate processes (vLLM, SGLang, vLLM-Omni) run on it."""


_CUDA = DeviceKind(
    name="cuda",
    hardware="NVIDIA GPU, or AMD GPU with ROCm",
    collectives="nccl",
    ray_resource="GPU",
    visible="CUDA_VISIBLE_DEVICES",
    files=r"nvidia\d+",
    shares_memory=True,
    broadcasts=True,
    has_ragged_attention=True,
    block_attention="fused",
)
_EVERY = (
    DeviceKind(name="cpu", hardware="CPU", is_accelerator=False, broadcasts=True, block_attention="host"),
    _CUDA,
    DeviceKind(
        name="npu",
        hardware="Ascend NPU",
        extension="torch_npu",
        collectives="hccl",
        ray_resource="NPU",
        visible="ASCEND_RT_VISIBLE_DEVICES",
        files=r"davinci\d+",
    ),
    DeviceKind(name="xpu", hardware="Intel GPU", collectives="xccl", ray_resource="GPU", visible="ZE_AFFINITY_MASK"),
    DeviceKind(
        name="mps", hardware="Apple GPU", has_many=False, has_float64=False, counts_memory=False, has_engines=False
    ),
)
KINDS: Mapping[str, DeviceKind] = {kind.name: kind for kind in _EVERY}
"""By torch's name, the CPU first."""

_PRETENDED = DeviceKind(
    name=PRETEND,
    hardware=f"the {_CUDA.hardware} that a rehearsal pretends to have",
    has_ragged_attention=_CUDA.has_ragged_attention,
    block_attention=_CUDA.block_attention,
)


def kind_of(device: str) -> DeviceKind:
    """The kind of a device such as "cuda" or "cuda:0". Raises ConfigError for one that is not known."""
    name = device.partition(":")[0]
    if name == PRETEND:
        return _PRETENDED
    if name not in KINDS:
        raise ConfigError(f"device is {device!r}; choose one of {', '.join(KINDS)}")
    return KINDS[name]


def lacks(device: str, feature: str, instead: str) -> str:
    """The message that a device has no such feature. instead: what to do, as a sentence."""
    kind = kind_of(device)
    return f"device: {kind.name} ({kind.hardware}) has no {feature}. {instead}"


ONE_DEVICE_ALONE = "One device trains without FSDP if fsdp.cpu_offload is false: set it so, or another device."


def only_one(device: str, num_devices: int) -> str:
    """The message that a run cannot use several of a device."""
    return lacks(
        device,
        f"collectives, which num_devices = {num_devices} needs",
        "Set num_devices: 1 and runtime: local, or another device.",
    )
