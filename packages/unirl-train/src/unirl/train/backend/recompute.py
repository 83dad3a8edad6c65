"""Which results of a block are kept where the rest is recomputed in the backward: matrix products and attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from unirl.types.protocols.models import RecomputeContexts

PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"}
)
"""Operators of `aten` by name."""


def keeps_result(operator: Callable[..., Any]) -> bool:  # Any: an operator's values
    """True for matrix products, convolutions and attention of torch or of the flash-attn packages."""
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return operator.name() == "flex_attention"
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    name = operator._schema.name.rpartition("::")[2]
    if operator.namespace == "aten":
        return name in PRODUCTS or ("attention" in name and "backward" not in name)
    return operator.namespace == "torch_attn" or "flash_attn" in operator.namespace


def selective(contexts: RecomputeContexts = noop_context_fn, *, is_compiled: bool = False) -> RecomputeContexts:
    """`context_fn` of torch.utils.checkpoint that keeps the results of such operators, by way of the hooks of saved
    tensors, if there are any.

    contexts: what the forward and the recomputation are entered with besides; not for blocks that are compiled.
    """
    if is_compiled:
        return partial(create_selective_checkpoint_contexts, _policy)  # the form that the compiler knows
    return partial(_both, contexts)


def _policy(
    context: SelectiveCheckpointContext, operator: Callable[..., Any], *args: Any, **kwargs: Any
) -> CheckpointPolicy:  # Any: as above
    del context, args, kwargs
    return CheckpointPolicy.MUST_SAVE if keeps_result(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _both(contexts: RecomputeContexts) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    forward, again = contexts()
    keeping, finding = create_selective_checkpoint_contexts(_policy)
    keeping.respect_saved_tensors_hooks = True
    return _Nested(forward, keeping), _Nested(again, finding)


class _Nested(AbstractContextManager[None]):
    """One manager within another. Entered a second time, where torch says that it keeps results for one backward."""

    def __init__(self, *managers: AbstractContextManager[Any]) -> None:
        self._managers = managers
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for manager in self._managers:
            self._stack.enter_context(manager)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)
