"""Which results of a block are kept where the rest is recomputed in the backward: matrix products and attention."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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
    return _nested(forward, keeping), _nested(again, finding)


@contextmanager
def _nested(outer: AbstractContextManager[None], inner: AbstractContextManager[Any]) -> Generator[None]:
    with outer, inner:
        yield
