"""Spreads the tokens of a transformer over ranks: where they are cut, which attention needs all of them, where they are
whole again.

Between the cuts and the end every rank computes with its part of the tokens of each stream (image, text). Around an
attention it exchanges its tokens with all heads for all tokens with its heads. What stands outside is computed by every
rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unirl.models.rules import undivided_heads
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import TokenExchange, TokenRing
from unirl.types.recipe import heads_option


@dataclass(frozen=True)
class Tokens:
    """A dimension of a tensor, and the stream whose tokens lie along it."""

    stream: str
    dim: int = 1
    """Negative ones count from the end."""


IMAGE, TEXT = Tokens("image"), Tokens("text")
"""[B, T, ...]"""


@dataclass(frozen=True)
class TokenPlan:
    """How the tokens of one transformer are spread. Modules by path, in which * stands for any one name.

    A list is cut tensor by tensor. A tensor without the dimension of its tokens is left as it is, and so is None.
    """

    whole_again: Mapping[str, Tokens]
    """Modules whose output is gathered. No parameter of the model may stand after them."""
    attention: Mapping[str, tuple[str, ...]]
    """Attention modules -> streams in the order in which their tokens follow one another."""
    arguments: Mapping[str, Mapping[str, Tokens]] = field(default_factory=dict)
    """Modules -> arguments of their forward that are cut."""
    outputs: Mapping[str, Mapping[int, Tokens]] = field(default_factory=dict)
    """Modules -> outputs that are cut, by place; 0 for the only one."""
    needs_parts: tuple[str, ...] = ()
    """Streams of which every rank must have a token. Of others a rank may have none."""
    masks_queries: bool = False
    """True if attention masks are [B, 1, T, T], of tokens that count as key and as query alike."""


class SpreadTokens:
    """The tokens of modules that one plan fits, spread over the ranks of an exchange. Changes the modules in place.

    Every rank runs equal forwards. Raises ConfigError if the ranks do not divide the attention heads, and
    ContractError for a plan of another model.
    """

    def __init__(self, components: Mapping[str, nn.Module], plan: TokenPlan, exchange: TokenExchange) -> None:
        self._exchange = exchange
        self.plan = plan
        self._lengths: dict[str, int] = {}
        """Tokens of each stream in the forward that runs."""
        for component, module in components.items():
            self._spread(component, module)

    def _spread(self, component: str, module: nn.Module) -> None:
        plan = self.plan
        modules: dict[str, Any] = dict(module.named_modules())  # Any: attention modules of diffusers share no base
        for pattern, cuts in plan.arguments.items():
            for found in _matching(component, modules, pattern):
                names = list(inspect.signature(type(found).forward).parameters)[1:]
                hook = functools.partial(self._cut_arguments, names, cuts)
                found.register_forward_pre_hook(hook, with_kwargs=True)
        for pattern, places in plan.outputs.items():
            for found in _matching(component, modules, pattern):
                found.register_forward_hook(functools.partial(self._cut_outputs, places))
        for pattern, tokens in plan.whole_again.items():
            for found in _matching(component, modules, pattern):
                found.register_forward_hook(functools.partial(self._gather, tokens))
        num_attentions = 0
        for path, found in modules.items():
            streams = [own for pattern, own in plan.attention.items() if _matches(path, pattern)]
            if streams:
                num_attentions += 1
                where, size = f"{component}.{path}", self._exchange.num_head_parts
                if found.heads % size:
                    has_ring = self._exchange.ring is not None
                    problem = undivided_heads(heads_option(has_ring), size, found.heads, where, has_ring=has_ring)
                    raise ConfigError(problem)
                found.forward = functools.partial(self._attend, where, found.forward, streams[0])
        if not num_attentions:
            raise ContractError(f"{component} has no module {' or '.join(plan.attention)}, which its token plan names")

    def recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """See RecomputeContexts: a block that is recomputed sees the lengths of the forward that it repeats."""
        return nullcontext(), self._with_lengths(dict(self._lengths))

    @contextmanager
    def _with_lengths(self, lengths: dict[str, int]) -> Generator[None]:
        now, self._lengths = self._lengths, lengths
        try:
            yield
        finally:
            self._lengths = now

    def lengths_by_rank(self, streams: Sequence[str]) -> list[int]:
        """Tokens of each rank, of streams together."""
        return [sum(own) for own in zip(*self._parts(streams), strict=True)]

    def places(self, streams: Sequence[str]) -> list[int]:
        """Where the tokens that stand rank after rank stand in the whole, stream after stream."""
        found, starts, offset = list[int](), list[int](), 0
        for stream in streams:
            starts.append(offset)
            offset += self._lengths[stream]
        parts = self._parts(streams)
        for rank in range(self._exchange.size):
            for number, own in enumerate(parts):
                found += range(starts[number], starts[number] + own[rank])
                starts[number] += own[rank]
        return found

    def _parts(self, streams: Sequence[str]) -> list[list[int]]:
        return [self._exchange.lengths(self._lengths[stream]) for stream in streams]

    # Hooks -----------------------------------------------------------------------------------------------------------

    def _cut(self, whole: Any, tokens: Tokens) -> Any:  # Any: an argument of any model
        if isinstance(whole, (list, tuple)):
            return [self._cut(each, tokens) for each in whole]
        if not isinstance(whole, Tensor) or not -whole.ndim <= tokens.dim < whole.ndim:
            return whole
        length = whole.shape[tokens.dim]
        if tokens.stream in self.plan.needs_parts and length < self._exchange.size:
            raise ConfigError(
                f"topology.sp = {self._exchange.size}, but there are {length} tokens of {tokens.stream}, of which "
                f"every rank needs one. Set topology.sp to {length} at most."
            )
        self._lengths[tokens.stream] = length
        return self._exchange.own(whole, tokens.dim)

    def _cut_arguments(
        self, names: Sequence[str], cuts: Mapping[str, Tokens], _: nn.Module, args: Any, kwargs: Any
    ) -> Any:  # Any: arguments of any model
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        cut = {name: self._cut(given[name], tokens) for name, tokens in cuts.items() if name in given}
        placed = tuple(cut.get(name, value) for name, value in zip(names, args, strict=False))
        return placed, {name: cut.get(name, value) for name, value in kwargs.items()}

    def _cut_outputs(self, places: Mapping[int, Tokens], _: nn.Module, args: Any, output: Any) -> Any:  # Any: as above
        if isinstance(output, Tensor):
            return self._cut(output, places[0])
        return tuple(
            self._cut(value, places[place]) if place in places else value for place, value in enumerate(output)
        )

    def _gather(self, tokens: Tokens, _: nn.Module, args: Any, output: Tensor) -> Tensor:  # Any: as above
        return self._exchange.gathered(output, tokens.dim, self.lengths_by_rank([tokens.stream]))

    def _attend(
        self, path: str, forward: Callable[..., Any], streams: Sequence[str], *args: Any, **kwargs: Any
    ) -> Any:  # Any: as above
        with _AttentionOfHeads(self, self._exchange, streams) as attention:
            output = forward(*args, **kwargs)
        if attention.num_calls != 1:
            raise ContractError(
                f"{path} computed attention {attention.num_calls} times by scaled_dot_product_attention, where its "
                "tokens are exchanged, instead of once. Set topology.sp: 1."
            )
        return output


class _AttentionOfHeads(TorchFunctionMode):
    """Inside, scaled_dot_product_attention over parts of the tokens gives its rows of attention over all.

    A mode, because what attention modules share is this function: their projections, norms and rotations differ.
    """

    def __init__(self, spread: SpreadTokens, exchange: TokenExchange, streams: Sequence[str]) -> None:
        super().__init__()
        self._spread, self._exchange, self._streams = spread, exchange, streams
        self.num_calls = 0

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: any function of torch
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.num_calls += 1
        return self._attention(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:  # Any: other options of the function
        if query.shape != key.shape or query.shape != value.shape or options.get("is_causal"):
            raise ContractError(
                f"tokens are exchanged around attention among themselves, not of {list(query.shape)} to "
                f"{list(key.shape)}, causal: {options.get('is_causal', False)}"
            )
        lengths = self._spread.lengths_by_rank(self._streams)
        mask = None if attn_mask is None else self._of_all_tokens(attn_mask, lengths)
        if torch.is_autocast_enabled(query.device.type):  # which casts them where attention is computed: after the way
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (each.to(dtype) for each in (query, key, value))
        query, key, value = self._exchange.to_heads(torch.stack([query, key, value]), lengths).unbind()
        if self._exchange.ring is None:
            found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        else:
            found = self._around(self._exchange.ring, query, key, value, mask, lengths, **options)
        return self._exchange.to_tokens(found, lengths)

    def _around(
        self,
        ring: TokenRing,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        lengths: Sequence[int],
        *,
        dropout_p: float = 0.0,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:  # Any: as above
        """Attention to the tokens of all ranks of the ring."""
        unknown = {"dropout_p": dropout_p, **options}
        if any(unknown.values()):
            raise ContractError(f"attention around a ring knows nothing of {unknown}. Set topology.ring: 1.")
        parts = ring.lengths(lengths)
        masks = None if mask is None else _Blocks(mask, parts, ring.rank)
        return ring.attention(query, key, value, lengths=parts, masks=masks, scale=scale)

    def _of_all_tokens(self, mask: Tensor, lengths: Sequence[int]) -> Tensor:
        """A mask [B, 1, 1, T] of keys in the order of the exchange, given for this rank's tokens or for all; or
        [B, 1, T, T] of keys and queries, given for this rank's."""
        is_of_both = mask.ndim == 4 and mask.shape[2] == mask.shape[3] and self._spread.plan.masks_queries
        if mask.ndim != 4 or mask.shape[1] != 1 or not (mask.shape[2] == 1 or is_of_both):
            raise ContractError(f"a mask of {list(mask.shape)} does not say of each token whether it counts")
        if is_of_both:
            counts = self._exchange.gathered(mask.diagonal(dim1=2, dim2=3), 2, lengths)
            return counts[..., None] & counts[..., None, :]
        if mask.shape[-1] == sum(lengths):
            return mask[..., self._spread.places(self._streams)]
        return self._exchange.gathered(mask, 3, lengths)


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Implements unirl.types.protocols.models.BlockMasks for tokens that count or do not."""

    whole: Tensor
    """bool [B, 1, 1 or T, T]"""
    parts: Sequence[int]
    """Tokens of each rank of the ring."""
    rank: int

    def has_pairs(self, rank: int) -> bool:
        return True

    def mask(self, rank: int) -> Tensor:
        queries = self.whole if self.whole.shape[2] == 1 else self.whole.split(list(self.parts), 2)[self.rank]
        return queries.split(list(self.parts), 3)[rank]


def _matches(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(own in ("*", name) for name, own in zip(names, wanted, strict=True))


def _matching(component: str, modules: Mapping[str, nn.Module], pattern: str) -> list[nn.Module]:
    found = [module for path, module in modules.items() if _matches(path, pattern)]
    if not found:
        raise ContractError(f"{component} has no module {pattern}, which its token plan names")
    return found
