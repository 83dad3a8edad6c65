"""Splits arguments for the shards of a role and joins the results. Pure functions, no transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unirl.types.batch import Batch
from unirl.types.errors import ConfigError, ContractError
from unirl.types.roles import Collect, Dispatch, MeshPlace
from unirl.types.rollout import RolloutResp


@dataclass(frozen=True)
class HeldKey:
    """Key of a held value in each worker's table. Stands in for the value when arguments are split."""

    number: int


def shard_ranks(places: Sequence[MeshPlace]) -> list[list[int]]:
    """The ranks of each data-parallel place, given the places of all ranks in order. The first rank of a place answers
    for it.

    Raises ConfigError if ranks disagree on the number of shards, or shards have different numbers of ranks.
    """
    size = places[0].dp_size
    ranks: list[list[int]] = [[] for _ in range(size)]
    for rank, place in enumerate(places):
        if place.dp_size != size:
            raise ConfigError(f"rank {rank} counts {place.dp_size} data-parallel places, rank 0 counts {size}")
        ranks[place.dp_rank].append(rank)
    if len({len(own) for own in ranks}) > 1:
        raise ConfigError(
            f"{len(places)} ranks stand at {size} data-parallel places as {[len(own) for own in ranks]}; "
            "every place needs as many. Change num_devices or the sizes of the mesh."
        )
    return ranks


def shard_bounds(size: int, num_shards: int, what: str) -> list[tuple[int, int]]:
    """Contiguous (start, stop) of equal shards. Raises ContractError if `size` is not divisible by `num_shards`."""
    if size % num_shards:
        raise ContractError(
            f"{what} has {size} samples, which do not divide over {num_shards} devices. "
            "Change batch_size, sampling.samples_per_prompt or num_devices."
        )
    step = size // num_shards
    return [(rank * step, (rank + 1) * step) for rank in range(num_shards)]


def num_samples(value: Any) -> int | None:  # Any: arguments of any role
    """Number of samples that DP_SCATTER would split; None for a value that it repeats for every shard.

    A response counts its root samples; samples that grew from them stay with them.
    """
    if isinstance(value, RolloutResp) and value.tracks:
        return value.root_track().batch_size
    if isinstance(value, Batch):
        return value.batch_size
    return None


def scatter(value: Any, num_shards: int) -> list[Any]:  # Any: arguments of any role
    """One item per shard: batches are split, everything else is repeated."""
    size = num_samples(value)
    if size is None:
        return [value] * num_shards
    bounds = shard_bounds(size, num_shards, type(value).__name__)
    return [value] if num_shards == 1 else [value.slice(start, stop) for start, stop in bounds]


def shard_arguments(
    dispatch: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any], num_shards: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(args, kwargs) for every shard in order; for RANK_ZERO of the single rank that is called.

    Raises ContractError if a scattered list does not have one item per shard, the split arguments disagree on the
    number of samples, or rank zero would see its share of a held value as the whole.
    """
    values = (*args, *kwargs.values())
    if dispatch is Dispatch.RANK_ZERO:
        if num_shards > 1 and any(isinstance(value, HeldKey) for value in values):
            raise ContractError(
                f"rank zero has only its own share of a held value that lies in {num_shards} shards. "
                "Pass held.fetch(), or mark the method DP_SCATTER."
            )
        return [(args, kwargs)]
    if dispatch is Dispatch.BROADCAST:
        return [(args, kwargs)] * num_shards
    if dispatch is Dispatch.SCATTER:
        cut = _one_item_per_shard
    else:
        sizes = sorted({size for size in map(num_samples, values) if size is not None})
        if len(sizes) > 1:
            raise ContractError(f"the arguments of one call have different numbers of samples: {sizes}")
        cut = scatter
    columns = [cut(value, num_shards) for value in args]
    named = {name: cut(value, num_shards) for name, value in kwargs.items()}
    return [
        (tuple(column[shard] for column in columns), {name: column[shard] for name, column in named.items()})
        for shard in range(num_shards)
    ]


def _one_item_per_shard(value: Any, num_shards: int) -> list[Any]:
    if isinstance(value, HeldKey):
        return [value] * num_shards
    if not isinstance(value, (list, tuple)) or len(value) != num_shards:
        found = f"{len(value)} items" if isinstance(value, (list, tuple)) else type(value).__name__
        raise ContractError(f"a scattered argument needs a list of {num_shards} items, one per shard; got {found}")
    return list(value)


def collected(collect: Collect, results: list[Any]) -> Any:  # Any: results of any role
    """The shards' results as the driver gets them. The runtime handles HOLD itself."""
    if collect is Collect.FIRST:
        return results[0]
    if collect is Collect.ALL:
        return results
    first = results[0]
    if any(type(result) is not type(first) for result in results):
        raise ContractError(f"cannot join results of different types: {[type(result).__name__ for result in results]}")
    if isinstance(first, Batch):
        return type(first).concat(results)
    if isinstance(first, list):
        return [item for result in results for item in result]
    if isinstance(first, Tensor):
        raise ContractError("return a Batch or a list from a method that is collected by CONCAT, not a bare tensor")
    raise ContractError(f"cannot join {type(first).__name__} results of {len(results)} shards")
