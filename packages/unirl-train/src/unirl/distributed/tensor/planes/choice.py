"""The data plane that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.distributed.tensor.planes.base import DataPlane, ObjectPlane, PlaneName
from unirl.distributed.tensor.planes.queue import QueuePlane


def make_plane(name: PlaneName, options: Mapping[str, Any], timeout_s: float) -> DataPlane:  # Any: TransferQueue's own
    """Make a data plane. options: for TransferQueue. timeout_s: of one transfer."""
    match name:
        case "ray":
            return ObjectPlane()
        case "rdt":
            from unirl.distributed.tensor.planes.direct import DirectPlane  # its classes derive from Ray's

            return DirectPlane(timeout_s)
        case "transfer_queue":
            return QueuePlane(options, timeout_s)
