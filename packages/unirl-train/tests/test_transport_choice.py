"""Which transport a device has."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unirl.distributed.weight_sync.transports.broadcast import BroadcastTransport
from unirl.distributed.weight_sync.transports.choice import make_transport
from unirl.distributed.weight_sync.transports.files import FileTransport
from unirl.distributed.weight_sync.transports.ipc import DeviceTransport
from unirl.types.errors import ConfigError


def made(name: Any, device: str, *, shares_device: bool = False) -> object:
    engines: Any = SimpleNamespace(workers=("engine",), timeout_s=1.0)
    return make_transport(
        name, torch.device(device), engines, "/dev/shm", shares_device=shares_device, lends_files=False
    )


@pytest.mark.parametrize(
    ("name", "device", "shares_device", "expected"),
    [
        ("ipc", "cuda", True, DeviceTransport),
        ("ipc", "cuda", False, FileTransport),
        ("ipc", "xpu", False, FileTransport),
        ("ipc", "cpu", True, FileTransport),
        ("nccl", "cuda", False, BroadcastTransport),
        ("nccl", "cpu", False, BroadcastTransport),
        ("files", "mps", True, FileTransport),
    ],
)
def test_a_transport_is_made_for_the_device(name, device, shares_device, expected):
    assert isinstance(made(name, device, shares_device=shares_device), expected)


@pytest.mark.parametrize("device", ["xpu", "mps"])
@pytest.mark.parametrize(
    ("name", "lacking"), [("ipc", "memory that processes share"), ("nccl", "groups that push weights")]
)
def test_a_transport_that_a_device_lacks_is_refused_with_another(name, lacking, device):
    expected = rf"device: {device} \(.* GPU\) has no {lacking}. Set sync.transport: files or ray."
    with pytest.raises(ConfigError, match=expected):
        made(name, device, shares_device=True)
