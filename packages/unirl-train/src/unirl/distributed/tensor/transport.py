"""How values cross from one process to another.

Most never do: a held value stays with the worker that made it, and the driver moves its key. What does cross goes
through Ray's object store (shared memory on one node, the network between nodes), as tensors on the CPU: the driver
needs no accelerator to receive a result, and a component decides the device of what it receives.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.types.batch import Batch


def outgoing(value: Any) -> Any:  # Any: arguments and results of any role
    """`value` ready to leave its process: every tensor detached, on the CPU, and with a storage of its own size.

    A slice that is pickled as it is takes the whole storage behind it along. Looks into batches, lists, tuples and
    dicts; other objects pass unchanged.
    """
    if isinstance(value, Tensor):
        return _own_storage(value.detach().cpu())
    if isinstance(value, Batch):
        return value.map_tensors(outgoing)
    if isinstance(value, dict):
        return {key: outgoing(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:  # a named tuple keeps its class
        return type(value)(outgoing(item) for item in value)
    return value


def _own_storage(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size() else tensor
