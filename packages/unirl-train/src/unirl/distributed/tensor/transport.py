"""Prepares values that leave their process.

Most values never do: a held value stays with the worker that made it, and the driver only passes its key. Rows that
another worker needs go through a data plane (`planes`); arguments and results go through Ray's object store (shared
memory on one node, the network between nodes). All tensors are on the CPU: the driver needs no accelerator to receive a
result, and a component chooses the device of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from unirl.types.batch import Batch


def outgoing(value: Any) -> Any:  # Any: arguments and results of any role
    """`value` with every tensor detached, on the CPU, and with a storage no larger than the tensor.

    Pickling a slice would include its whole storage. Tensors are found in batches, lists, tuples and dicts; other
    objects are returned unchanged.
    """
    return _mapped(value, lambda tensor: _own_storage(tensor.detach().cpu()))


def contiguous(value: Any) -> Any:  # Any: results of any role
    """`value` with every tensor contiguous, as Ray Direct Transport needs. Tensors are found as by `outgoing`."""
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
