"""Experts of tokens dealt out to ranks: tokens go where their experts are, and what these made of them comes back.

Legend: N tokens, K experts of a token, D width, E experts, P ranks, M rows that come to this rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from unirl.models.rules import sharing_problem
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import ExpertExchange
from unirl.types.weights import PublishedParts

Weights = dict[str, Tensor]
OwnExperts = Callable[[Weights, Tensor, Tensor], Tensor]
"""own(weights, rows [M, D], experts int64 [M]) -> [M, D]: each row by one of this rank's experts, numbered from 0."""


def spread_stacked(modules: Sequence[nn.Module], num_experts: int, where: str, exchange: ExpertExchange) -> None:
    """Let modules of stacked experts compute with those of all ranks, in place; parameters stay whole.

    modules: called with (tokens, their experts, weights), as those of transformers. num_experts: of each, which is also
    an attribute of it. where: for messages. Raises ConfigError if there are none, or they do not divide.
    """
    if not modules:
        raise ConfigError(f"topology.ep = {exchange.size}, but {where} has no experts. Set topology.ep: 1.")
    if num_experts % exchange.size:
        raise ConfigError(sharing_problem("topology.ep", exchange.size, num_experts, "experts", where))
    for module in modules:
        own = partial(_by_stand_in, _stand_in(module, num_experts // exchange.size))
        # The forward of the instance is replaced: a wrapper module would add its own name to every parameter.
        module.forward = partial(spread, module, own, num_experts, exchange)


def published_experts(modules: Mapping[str, nn.Module]) -> dict[str, PublishedParts]:
    """Where the weights of each expert lie in transformers' stacks [E, ...]. modules: by "component.path"."""
    found: dict[str, PublishedParts] = {}
    for name, module in modules.items():
        path = name.partition(".")[2]
        num_experts, inner = module.get_parameter("down_proj").shape[0], module.get_parameter("down_proj").shape[2]
        everything, gate, up = slice(None), slice(0, inner), slice(inner, 2 * inner)
        found[f"{name}.gate_up_proj"] = {
            f"{path}.{expert}.{kind}_proj.weight": (expert, rows)
            for expert in range(num_experts)
            for kind, rows in (("gate", gate), ("up", up))
        }
        found[f"{name}.down_proj"] = {
            f"{path}.{expert}.down_proj.weight": (expert, everything) for expert in range(num_experts)
        }
    return found


def spread(
    module: nn.Module,
    own: OwnExperts,
    num_experts: int,
    exchange: ExpertExchange,
    tokens: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The weighted sum [N, D] of the experts int64 [N, K] of tokens [N, D], with weights [N, K]."""
    experts = top_k_index.flatten()
    # Sorted by expert, rows are sorted by rank too.
    order = experts.argsort(stable=True)
    counts = experts.bincount(minlength=num_experts)
    of_mine = exchange.counted(counts)
    to_each = counts.view(exchange.size, -1).sum(1).tolist()
    of_each = of_mine.sum(1).tolist()
    rows = exchange.to_experts(tokens.index_select(0, order // top_k_index.shape[1]), to_each, of_each)
    numbers = torch.arange(of_mine.shape[1], device=rows.device).repeat(exchange.size)
    numbers = numbers.repeat_interleave(of_mine.flatten(), output_size=len(rows))
    if not of_mine.any():
        # A rank without rows computes one of zeros: its weights have gradients as on every other rank.
        made = own(_local_weights(module), torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers.new_zeros(1))[
            :0
        ]
    else:
        made = own(_local_weights(module), rows, numbers)
    back = exchange.to_tokens(made, of_each, to_each)
    of_token = back.index_select(0, order.argsort()).unflatten(0, top_k_index.shape)
    return (of_token * top_k_weights[..., None]).sum(1).to(tokens.dtype)


def _stand_in(module: nn.Module, num_own: int) -> nn.Module:
    """A copy of a module of transformers without values, for `num_own` experts: a function of its weights alone."""
    empty = {
        id(parameter): nn.Parameter(torch.empty(num_own, *parameter.shape[1:], dtype=parameter.dtype, device="meta"))
        for parameter in module.parameters()
    }
    found = copy.deepcopy(module, dict(empty))
    vars(found)["num_experts"] = num_own  # by which modules of transformers cut rows, and HunyuanImage3's
    return found


def _by_stand_in(stand_in: nn.Module, weights: Weights, rows: Tensor, experts: Tensor) -> Tensor:
    return functional_call(stand_in, weights, (rows, experts[:, None], torch.ones_like(rows[:, :1])))


def _local_weights(module: nn.Module) -> Weights:
    """This rank's experts: FSDP gathers its shards of them and leaves them cut over the ranks of the exchange."""
    return {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in module.named_parameters()
    }
