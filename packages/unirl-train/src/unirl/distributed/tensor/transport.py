"""How values cross from one process to another.

Most never do: a held value stays with the worker that made it, and the driver moves its key. Rows that another worker
needs go by a data plane (`planes`); arguments and results go through Ray's object store (shared memory on one node, the
network between nodes). All are tensors on the CPU: the driver needs no accelerator to receive a result, and a component
decides the device of what it receives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from unirl.types.batch import Batch


def outgoing(value: Any) -> Any:  # Any: arguments and results of any role
    """`value` ready to leave its process: every tensor detached, on the CPU, and with a storage of its own size.

    A slice that is pickled as it is takes the whole storage behind it along. Looks into batches, lists, tuples and
    dicts; other objects pass unchanged.
    """
    return _mapped(value, lambda tensor: _own_storage(tensor.detach().cpu()))


def contiguous(value: Any) -> Any:  # Any: results of any role
    """`value` with every tensor contiguous, which Ray Direct Transport needs. Looks where `outgoing` does."""
    return _mapped(value, Tensor.contiguous)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Batch):
        return value.map_tensors(lambda tensor: _mapped(tensor, function))
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:  # a named tuple keeps its class
        return type(value)(_mapped(item, function) for item in value)
    return value


def _own_storage(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size() else tensor
