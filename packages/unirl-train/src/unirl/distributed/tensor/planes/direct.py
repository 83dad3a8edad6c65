"""Ray Direct Transport: tensors go from worker to worker over gloo; only the objects that contain them go through Ray.

We use our own transport, because Ray's forms its gloo groups inside torch's default process group, which only spans a
worker's own group. Ray calls the interface alpha, and kills both workers if a transfer fails: the run then stops with
their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)
from torch import Tensor

from unirl.distributed.dispatch import HeldKey
from unirl.distributed.tensor.planes.base import DataPlane

_NAME = "UNIRL_GLOO"


@dataclass
class Direction(CommunicatorMetadata):
    """A directed pair of workers, and the store where they meet."""

    name: str = ""
    host: str = ""
    port: int = 0
    timeout_s: float = 0.0


class _Driver:
    """The store where the workers of all runs of this process meet. It is global because Ray makes the transports
    itself, without arguments."""

    def __init__(self, timeout_s: float) -> None:
        self.host = str(ray.util.get_node_ip_address())
        self.timeout_s = timeout_s
        self.store = torch.distributed.TCPStore(self.host, 0, is_master=True, wait_for_workers=False)


_driver: _Driver | None = None


class GlooTransport(TensorTransportManager):
    """Sends each tensor as one message, over a connection per direction that is made with its first transfer."""

    def __init__(self) -> None:
        self._connections: dict[str, Any] = {}  # Any: torch declares no methods of ProcessGroupGloo

    def tensor_transport_backend(self) -> str:
        """Name of this transport."""
        return _NAME

    @staticmethod
    def is_one_sided() -> bool:
        """False: both sides take part in a transfer."""
        return False

    @staticmethod
    def can_abort_transport() -> bool:
        """False: gloo cannot abort a transfer."""
        return False

    def actor_has_tensor_transport(self, actor: Any) -> bool:  # Any: a ray actor handle
        """True: every worker can send and receive."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Tensor]) -> TensorTransportMetadata:
        """Shapes and dtypes that the receiver must allocate."""
        described: list[Any] = [(tensor.shape, tensor.dtype) for tensor in rdt_object]  # Any: Ray's union
        return TensorTransportMetadata(tensor_meta=described, tensor_device="cpu" if described else None)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Direction:
        """In the driver: the meeting point of two workers."""
        if _driver is None:
            raise RuntimeError("no DirectPlane was made in this process")
        name = f"{src_actor._actor_id.hex()} to {dst_actor._actor_id.hex()}"
        return Direction(name, _driver.host, _driver.store.port, _driver.timeout_s)

    def send_multiple_tensors(
        self,
        tensors: list[Tensor],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """In the sending worker."""
        connection = self._connection(communicator_metadata, 0)
        for tensor in tensors:
            if tensor.numel():
                connection.send([tensor], 1, 0).wait()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """In the receiving worker."""
        connection = self._connection(communicator_metadata, 1)
        described: list[Any] = list(tensor_transport_metadata.tensor_meta)  # Any: Ray's union
        tensors = target_buffers or [torch.empty(shape, dtype=dtype) for shape, dtype in described]
        for tensor in tensors:
            if tensor.numel():
                connection.recv([tensor], 0, 0).wait()
        return tensors

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Tensor]
    ) -> None:
        """Does nothing, since nothing is kept per object."""

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Never called, see `can_abort_transport`."""
        raise NotImplementedError("gloo cannot break a transfer off")

    def _connection(self, direction: CommunicatorMetadata, rank: int) -> Any:  # Any: see _connections
        if not isinstance(direction, Direction):
            raise TypeError(f"expected a Direction, got {type(direction).__name__}")
        if direction.name not in self._connections:
            timeout = timedelta(seconds=direction.timeout_s)
            meeting = torch.distributed.TCPStore(direction.host, direction.port, is_master=False, timeout=timeout)
            store = torch.distributed.PrefixStore(direction.name, meeting)
            self._connections[direction.name] = torch.distributed.ProcessGroupGloo(store, rank, 2, timeout)
        return self._connections[direction.name]


class DirectPlane(DataPlane):
    """Sends rows directly from worker to worker. timeout_s: of a connection and of each message."""

    actor_options = {"enable_tensor_transport": True}  # without it a receiver hangs

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def prepare(self) -> None:
        global _driver
        if _driver is None:
            _driver = _Driver(self._timeout_s)
            register_tensor_transport(_NAME, ["cpu"], GlooTransport, Tensor)
        _driver.timeout_s = self._timeout_s

    def pick(self, actor: Any, key: HeldKey, rows: Sequence[int]) -> tuple[Any | None, Any]:
        """See DataPlane. Only the worker that assembles the rows knows when they are ready."""
        return None, actor.pick_contiguous.options(tensor_transport=_NAME).remote(key, rows)
