"""What code asks of a device."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.distributed

from unirl.types.device_kinds import KINDS, DeviceChoice, DeviceName, kind_of
from unirl.types.devices import (
    accelerator,
    building_on,
    collectives_of,
    current_stream,
    empty_cache,
    has_ragged_attention,
    has_values,
    in_use,
    is_accelerator,
    is_on_host,
    num_devices,
    on_stream,
    require_device,
    wide_float,
    widened,
)
from unirl.types.errors import ConfigError


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("meta", False), ("cuda:1", True), ("xpu", True)])
def test_a_device_with_its_own_memory_is_an_accelerator(device: str, expected: bool) -> None:
    assert is_accelerator(device) is expected
    assert is_accelerator(torch.device(device)) is expected
    assert has_values(device)


def test_a_cpu_has_no_cache_to_empty() -> None:
    empty_cache("cpu")


def test_a_part_for_the_host_is_built_where_it_computes_on_a_real_device() -> None:
    with building_on("cpu", of="cuda") as place:
        assert place == torch.device("cpu")
        assert not is_on_host()


class Module:
    """Torch's module of a kind of device."""

    def __init__(self, count: int, is_initialized: bool = False) -> None:
        self._count, self._is_initialized = count, is_initialized

    def is_available(self) -> bool:
        return self._count > 0

    def device_count(self) -> int:
        return self._count

    def is_initialized(self) -> bool:
        return self._is_initialized


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """machine(current, **modules): what torch says of this machine. current: its accelerator, as built and if there."""

    def make(current: str | None, **modules: Module) -> None:
        def module_of(device: str) -> Module:
            if device not in modules:
                raise RuntimeError(f"no module {device}")
            return modules[device]

        def accelerator(check_available: bool = False) -> SimpleNamespace | None:
            is_there = current is not None and (not check_available or modules[current].is_available())
            return SimpleNamespace(type=current) if is_there else None

        monkeypatch.setattr(torch, "get_device_module", module_of)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)

    return make


@pytest.mark.parametrize("name", ["cuda", "npu", "xpu", "mps"])
def test_the_accelerator_is_what_torch_finds(machine: Callable[..., None], name: str) -> None:
    machine(name, **{name: Module(3)})
    found = accelerator()
    assert found is not None and (found.name, num_devices(name), num_devices("cpu")) == (name, 3, 1)
    require_device(name)


def test_an_accelerator_that_torch_is_built_for_need_not_be_there(machine: Callable[..., None]) -> None:
    machine("cuda", cuda=Module(0))
    assert accelerator() is None and num_devices("cuda") == num_devices("npu") == 0


def test_a_rehearsal_hides_no_accelerator(machine: Callable[..., None]) -> None:
    machine("pretend", pretend=Module(1), cuda=Module(0), xpu=Module(2))
    found = accelerator()
    assert found is not None and found.name == "xpu"
    machine("pretend", pretend=Module(1), cuda=Module(0))
    assert accelerator() is None and in_use() is None


def test_a_device_that_is_not_here_is_named_with_what_it_needs(machine: Callable[..., None]) -> None:
    machine("xpu", xpu=Module(1))
    with pytest.raises(ConfigError, match=r"npu \(Ascend NPU\) is not here: .* and torch_npu, .* or set device: xpu"):
        require_device("npu")
    machine(None)
    with pytest.raises(ConfigError, match=r"device: cuda \(NVIDIA GPU, .* built for it. Mend that, or set device: cpu"):
        require_device("cuda:0")
    require_device("cpu")


def test_a_device_is_in_use_from_its_first_use_on(machine: Callable[..., None]) -> None:
    machine("cuda", cuda=Module(1))
    assert in_use() is None and current_stream() is None
    machine("cuda", cuda=Module(1, is_initialized=True))
    assert in_use() == "cuda"
    machine("mps", mps=Module(1))  # which has no lazy start, and one stream
    assert in_use() == "mps" and current_stream() is None
    machine("mps", mps=Module(0))
    assert in_use() is None


def test_without_an_accelerator_work_stays_in_its_only_stream(machine: Callable[..., None]) -> None:
    machine(None)
    assert current_stream() is None
    with on_stream(None):
        pass


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", "gloo"),
        ("cuda:0", "cpu:gloo,cuda:nccl"),
        ("npu", "cpu:gloo,npu:hccl"),
        ("xpu:1", "cpu:gloo,xpu:xccl"),
    ],
)
def test_collectives_are_those_of_the_device(device: str, expected: str) -> None:
    assert collectives_of(device) == expected


def test_torch_agrees_on_the_collectives_of_devices_that_it_knows() -> None:
    known = torch.distributed.Backend.default_device_backend_map
    assert {name: KINDS[name].collectives for name in ("cpu", "cuda", "xpu")} == {
        name: known[name] for name in ("cpu", "cuda", "xpu")
    }


def test_a_device_without_collectives_says_so() -> None:
    with pytest.raises(ConfigError, match=r"device: mps \(Apple GPU\) has no collectives, which FSDP needs. One"):
        collectives_of("mps")


def test_an_unknown_device_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="device is 'tpu'; choose one of cpu, cuda, npu, xpu, mps"):
        kind_of("tpu")


def test_ragged_rows_have_a_kernel_on_few_devices() -> None:
    half, whole = torch.bfloat16, torch.float32
    assert has_ragged_attention(torch.device("cuda"), half)
    assert not has_ragged_attention(torch.device("cuda"), whole)
    assert not any(has_ragged_attention(torch.device(name), half) for name in ("cpu", "xpu", "mps", "meta"))


def test_sums_are_wide_where_the_device_has_float64() -> None:
    assert widened(torch.ones(2)).dtype == widened(torch.ones(2, dtype=torch.bool)).dtype == torch.float64
    assert wide_float(torch.device("cuda")) == torch.float64
    assert wide_float(torch.device("mps")) == torch.float32


def test_every_name_of_the_type_is_a_kind() -> None:
    assert list(get_args(DeviceName)) == list(KINDS)
    assert list(get_args(DeviceChoice)) == ["auto", *KINDS]
    assert all(kind.name == name for name, kind in KINDS.items())
