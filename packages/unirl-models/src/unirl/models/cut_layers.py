"""Layers whose weights are divided among ranks: attention by heads and MLP by inner width, after the plan that
transformers has for a model. Each rank computes the same samples with its part, and what the parts make is summed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unirl.models.rules import layers_kept
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import CutBlock, LayerExchange

ROWS, COLUMNS, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Kinds of transformers' plans, which name the halves of the transposed weight."""


def cut_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], plan: Mapping[str, str], where: str, exchange: LayerExchange
) -> list[CutBlock]:
    """Let blocks compute with this rank's parts of their parameters, in place; parameters stay whole until they are
    cut.

    blocks: of `model`. plan: kind by path below the decoder, in which * stands for the number of a layer (transformers,
    `base_model_tp_plan`); paths without it lie outside of layers, and stay whole. where: for messages. Raises
    ConfigError for a plan that has more than layers which are cut by rows and then by columns.
    """
    at, paths = f"topology.tp = {exchange.size}", {id(module): path for path, module in model.named_modules()}
    plan = {path: kind for path, kind in plan.items() if "*" in path}
    unknown = sorted(set(plan.values()) - {ROWS, COLUMNS, WHOLE})
    if unknown or not {ROWS, COLUMNS} <= set(plan.values()):
        raise ConfigError(layers_kept(at, where, f"its plan has {unknown or 'no layer that is cut'}"))
    patterns = {re.compile(r"(.*\.)?" + re.escape(path).replace(r"\*", r"\d+")): kind for path, kind in plan.items()}
    found = []
    for block in blocks:
        kinds = {
            path: kind
            for path, _ in block.named_modules()
            for pattern, kind in patterns.items()
            if pattern.fullmatch(f"{paths[id(block)]}.{path}")
        }
        rows, columns = (tuple(path for path, kind in kinds.items() if kind == wanted) for wanted in (ROWS, COLUMNS))
        biased = [path for path in columns if f"{path}.bias" in dict(block.named_parameters())]
        if biased or not rows or not columns:
            reason = f"{biased[0]} has a bias, which each rank would add" if biased else "its plan names no such layer"
            raise ConfigError(layers_kept(at, where, reason))
        parts = [block.get_submodule(path) for path in sorted({path.rpartition(".")[0] for path in (*rows, *columns)})]
        inside = {id(module) for part in parts for module in part.modules()}
        for part in parts:
            part.forward = partial(_in_parts, exchange, list(part.modules()), part.forward)
        others = [module for module in block.modules() if id(module) not in inside]
        block.forward = partial(_with_own_weights, others, block.forward)
        found.append(CutBlock(block, rows, columns))
    return found


def _in_parts(
    exchange: LayerExchange,
    modules: Sequence[nn.Module],
    forward: Callable[..., Any],
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:  # Any: arguments and results of transformers' attention and MLP
    """The sum over ranks of what a module makes of the same hidden states; of several results, of the first."""
    with _own_weights(modules, exchange):
        out = forward(exchange.entered(hidden_states), *args, **kwargs)
    return (exchange.summed(out[0]), *out[1:]) if isinstance(out, tuple) else exchange.summed(out)


def _with_own_weights(
    modules: Sequence[nn.Module], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:  # Any: as above
    with _own_weights(modules, None):
        return forward(*args, **kwargs)


@contextmanager
def _own_weights(modules: Sequence[nn.Module], exchange: LayerExchange | None) -> Generator[None]:
    """Inside, parameters are the tensors that this rank has of them, through which gradients flow back.

    exchange: where each rank computes with its part, so that gradients of whole parameters add up; None where all
    compute the same.
    """
    kept = [
        (module._parameters, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    try:
        for held, name, parameter in kept:
            own = parameter.to_local()
            is_shared = exchange is not None and all(each.is_replicate() for each in parameter.placements)
            values: dict[str, Any] = held  # Any: torch types them as parameters, and takes tensors too
            values[name] = exchange.entered(own) if exchange is not None and is_shared else own
        yield
    finally:
        for held, name, parameter in kept:
            held[name] = parameter
