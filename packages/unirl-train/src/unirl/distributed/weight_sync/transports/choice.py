"""The transport that a recipe names."""

from __future__ import annotations

import torch

from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.weight_sync.transports.base import ObjectTransport, TransportName, WeightTransport
from unirl.distributed.weight_sync.transports.broadcast import BroadcastTransport
from unirl.distributed.weight_sync.transports.files import FileTransport
from unirl.distributed.weight_sync.transports.ipc import DeviceTransport
from unirl.types.bucket_files import MEMORY
from unirl.types.device_kinds import kind_of, lacks
from unirl.types.devices import is_accelerator
from unirl.types.errors import ConfigError


def make_transport(
    name: TransportName,
    device: torch.device,
    engines: RemoteRole,
    folder: str,
    *,
    shares_device: bool,
    lends_files: bool,
) -> WeightTransport:
    """Make a transport from a worker on `device` to engines. folder: for "files". shares_device: see
    `connect_elsewhere`.

    Raises ConfigError for a transport that the device does not have.
    """
    match name:
        case "ray":
            return ObjectTransport()
        case "files":
            return FileTransport(
                folder,
                "Set sync.transfer_dir to a folder that what trains and the engines both see, or choose another "
                "sync.transport.",
                lends_files=lends_files,
            )
        case "ipc" if shares_device and is_accelerator(device):
            if not kind_of(device.type).shares_memory:
                raise ConfigError(
                    lacks(device.type, "memory that processes share", "Set sync.transport: files or ray.")
                )
            # A worker sees only its own GPU, so another worker can map its memory only if both are on that GPU.
            return DeviceTransport(device)
        case "ipc":
            return FileTransport(
                MEMORY,
                "ipc needs what trains and the engines on one node; otherwise set sync.transport: nccl.",
                lends_files=lends_files,
            )
        case "nccl":
            if not kind_of(device.type).broadcasts:
                raise ConfigError(lacks(device.type, "groups that push weights", "Set sync.transport: files or ray."))
            return BroadcastTransport(device, len(engines.workers), engines.timeout_s)
