"""How arguments are cut for the ranks of a role and how results come back. Pure functions, no transport."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.types.batch import Batch
from unirl.types.errors import ContractError
from unirl.types.roles import Collect, Dispatch, PerSample


def shard_bounds(size: int, num_shards: int, what: str) -> list[tuple[int, int]]:
    """Contiguous (start, stop) of equal shards. Raises ContractError where `size` does not divide."""
    if size % num_shards:
        raise ContractError(
            f"{what} has {size} samples, which do not divide over {num_shards} devices. "
            "Change batch_size, sampling.samples_per_prompt or num_devices."
        )
    step = size // num_shards
    return [(rank * step, (rank + 1) * step) for rank in range(num_shards)]


def scatter(value: Any, num_shards: int) -> list[Any]:  # Any: arguments of any role
    """One item a rank: batches and PerSample values are cut, everything else is repeated."""
    if isinstance(value, Batch):
        bounds = shard_bounds(value.batch_size, num_shards, type(value).__name__)
        return [value] if num_shards == 1 else [value.slice(*pair) for pair in bounds]
    if isinstance(value, PerSample):
        bounds = shard_bounds(len(value.value), num_shards, "a per-sample argument")
        return [value.value[start:stop] for start, stop in bounds]
    return [value] * num_shards


def rank_arguments(
    dispatch: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any], num_ranks: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(args, kwargs) of every rank that is called, rank 0 first."""
    if dispatch is Dispatch.RANK_ZERO:
        num_ranks = 1
    if dispatch in (Dispatch.BROADCAST, Dispatch.RANK_ZERO):
        return [(args, kwargs)] * num_ranks
    if dispatch is Dispatch.SCATTER:
        for value in (*args, *kwargs.values()):
            if not isinstance(value, (list, tuple)) or len(value) != num_ranks:
                raise ContractError(
                    f"a scattered argument needs a list of {num_ranks} items, one a rank; got {value!r}"
                )
        columns = [list(value) for value in args]
        named = {name: list(value) for name, value in kwargs.items()}
    else:
        columns = [scatter(value, num_ranks) for value in args]
        named = {name: scatter(value, num_ranks) for name, value in kwargs.items()}
    return [
        (tuple(column[rank] for column in columns), {name: column[rank] for name, column in named.items()})
        for rank in range(num_ranks)
    ]


def collected(collect: Collect, results: list[Any]) -> Any:  # Any: results of any role
    """What the driver sees of the ranks' results (HOLD is the runtime's own affair)."""
    if collect is Collect.FIRST:
        return results[0]
    if collect is Collect.ALL:
        return results
    first = results[0]
    if isinstance(first, Batch):
        return type(first).concat(results)
    if isinstance(first, list):
        return [item for result in results for item in result]
    if isinstance(first, Tensor):
        raise ContractError("return a Batch or a list from a method that is collected by CONCAT, not a bare tensor")
    raise ContractError(f"cannot join {type(first).__name__} results of {len(results)} ranks")
