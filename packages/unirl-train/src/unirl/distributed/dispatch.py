"""How arguments are cut for the ranks of a role and how results come back. Pure functions, no transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unirl.types.batch import Batch
from unirl.types.errors import ContractError
from unirl.types.roles import Collect, Dispatch
from unirl.types.rollout import RolloutResp


@dataclass(frozen=True)
class HeldKey:
    """Names a held value in each worker's own table. Stands in for the value wherever arguments are cut."""

    number: int


def shard_bounds(size: int, num_shards: int, what: str) -> list[tuple[int, int]]:
    """Contiguous (start, stop) of equal shards. Raises ContractError where `size` does not divide."""
    if size % num_shards:
        raise ContractError(
            f"{what} has {size} samples, which do not divide over {num_shards} devices. "
            "Change batch_size, sampling.samples_per_prompt or num_devices."
        )
    step = size // num_shards
    return [(rank * step, (rank + 1) * step) for rank in range(num_shards)]


def num_samples(value: Any) -> int | None:  # Any: arguments of any role
    """How many samples DP_SCATTER would cut; None for a value that it repeats on every rank.

    A response counts its root samples: what grew from them goes along.
    """
    if isinstance(value, RolloutResp) and value.tracks:
        return value.root_track().batch_size
    if isinstance(value, Batch):
        return value.batch_size
    return None


def scatter(value: Any, num_shards: int) -> list[Any]:  # Any: arguments of any role
    """One item per rank: batches are cut, everything else is repeated."""
    size = num_samples(value)
    if size is None:
        return [value] * num_shards
    bounds = shard_bounds(size, num_shards, type(value).__name__)
    return [value] if num_shards == 1 else [value.slice(start, stop) for start, stop in bounds]


def rank_arguments(
    dispatch: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any], num_ranks: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(args, kwargs) of every rank that is called, rank 0 first.

    Raises ContractError where a scattered list has another length than the ranks, where the arguments that are cut
    disagree on the number of samples, and where rank zero would see its own share of a held value as if it were all.
    """
    values = (*args, *kwargs.values())
    if dispatch is Dispatch.RANK_ZERO:
        if num_ranks > 1 and any(isinstance(value, HeldKey) for value in values):
            raise ContractError(
                f"rank zero has only its own share of a held value that lies on {num_ranks} ranks. "
                "Pass held.fetch(), or mark the method DP_SCATTER."
            )
        return [(args, kwargs)]
    if dispatch is Dispatch.BROADCAST:
        return [(args, kwargs)] * num_ranks
    if dispatch is Dispatch.SCATTER:
        cut = _one_item_a_rank
    else:
        sizes = sorted({size for size in map(num_samples, values) if size is not None})
        if len(sizes) > 1:
            raise ContractError(f"the arguments of one call have different numbers of samples: {sizes}")
        cut = scatter
    columns = [cut(value, num_ranks) for value in args]
    named = {name: cut(value, num_ranks) for name, value in kwargs.items()}
    return [
        (tuple(column[rank] for column in columns), {name: column[rank] for name, column in named.items()})
        for rank in range(num_ranks)
    ]


def _one_item_a_rank(value: Any, num_ranks: int) -> list[Any]:
    if isinstance(value, HeldKey):
        return [value] * num_ranks
    if not isinstance(value, (list, tuple)) or len(value) != num_ranks:
        found = f"{len(value)} items" if isinstance(value, (list, tuple)) else type(value).__name__
        raise ContractError(f"a scattered argument needs a list of {num_ranks} items, one a rank; got {found}")
    return list(value)


def collected(collect: Collect, results: list[Any]) -> Any:  # Any: results of any role
    """What the driver sees of the ranks' results (HOLD is the runtime's own affair)."""
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
    raise ContractError(f"cannot join {type(first).__name__} results of {len(results)} ranks")
