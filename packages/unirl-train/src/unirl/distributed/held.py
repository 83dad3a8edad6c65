"""Results of calls: `Held` stays with the workers that made it, `Future` is not ready yet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

from torch import Tensor

from unirl.distributed.dispatch import HeldKey, collected
from unirl.types.errors import ContractError
from unirl.types.roles import Collect
from unirl.types.rollout import RolloutResp

ResultT = TypeVar("ResultT")


class Holder(Protocol):
    """Interface of a runtime whose workers hold values."""

    @property
    def is_closed(self) -> bool:
        """True if the workers have been stopped."""
        ...

    def map_held(
        self, key: HeldKey, function: Callable[..., ResultT], shard_args: Sequence[tuple[Any, ...]]
    ) -> list[ResultT]:
        """function(value, *args) on every worker's share of a held value, with the args of its shard; one result per
        shard."""
        ...

    def gather(self, sources: Sequence[tuple[Held, Sequence[int]]]) -> Held:
        """A new held value with samples of others, split evenly over these workers. sources: (value, rows) in order."""
        ...

    def pick_rows(self, calls: Sequence[tuple[int, HeldKey, tuple[int, ...]]]) -> list[Any]:  # Any: also references
        """Rows of held values, given (shard, key, rows): the rows, or references that workers of the same kind can
        read."""
        ...

    def release(self, key: HeldKey) -> None:
        """Free a held value on every worker."""
        ...

    def write(self, key: HeldKey, paths: Sequence[Path]) -> None:
        """Write each shard of a held value to a file, where it lies."""
        ...

    def landed(self, held: Held) -> Held:
        """The value where it waits for no worker, see `Held.landed`."""
        ...


class Held:
    """A result that stays with the workers that made it. The driver has its ids and versions, and the values it
    attached.

    In a run with several groups of workers (`unirl.distributed.groups`), it moves to the group that is called with it.
    """

    def __init__(self, runtime: Holder, key: HeldKey, metas: list[RolloutResp]) -> None:
        self._runtime = runtime
        self._metas = metas
        self._is_released = False
        self.key = key
        self.is_landed = False
        """True if no worker holds it, see `landed`."""

    @property
    def meta(self) -> RolloutResp:
        """The metadata of all shards, in order."""
        return collected(Collect.CONCAT, self._metas)

    @property
    def runtime(self) -> Holder:
        """The runtime whose workers hold the value."""
        return self._runtime

    @property
    def metas(self) -> Sequence[RolloutResp]:
        """The metadata of each shard."""
        return self._metas

    def key_for(self, runtime: Holder) -> HeldKey:
        """The key, for a call on `runtime`. Raises ContractError if another runtime's workers hold the value."""
        if self._is_released:
            raise ContractError(f"held value {self.key.number} was released before it was used")
        if runtime is not self._runtime:
            raise ContractError(f"held value {self.key.number} is held by other workers; copy it to these with gather")
        return self.key

    def move_to(self, runtime: Holder) -> None:
        """Move the value to the workers of another runtime, split over them; rows go from worker to worker.

        Raises ContractError if its samples do not divide over them.
        """
        if runtime is self._runtime:
            return
        moved = runtime.gather([(self, range(sum(meta.batch_size for meta in self._metas)))])
        self.release()
        self._runtime, self.key, self._metas, self._is_released = runtime, moved.key, moved._metas, False
        self.is_landed = False

    def landed(self) -> Held:
        """The value where it waits for no call of the workers that made it and outlives them; it moves to the workers
        that are called with it. This one may no longer be used."""
        return self._runtime.landed(self)

    def map(self, function: Callable[..., ResultT], *args: Any) -> list[ResultT]:
        """function(value, *args) on the workers that hold the value; one result per shard. `function` must pickle.

        All ranks that hold the same shard run it, so it may change the value.
        """
        return self._runtime.map_held(self.key_for(self._runtime), function, [args] * len(self._metas))

    def attach(self, track: str, **fields: Tensor | Mapping[str, Tensor]) -> None:
        """Write values [B, ...] of all samples, or several by name, into the held track; every shard gets its own rows.

        Raises ContractError if the sizes disagree.
        """
        sizes = [meta.track(track).batch_size for meta in self._metas]
        named = {name: values if isinstance(values, Mapping) else {name: values} for name, values in fields.items()}
        wrong = {key: len(own) for values in named.values() for key, own in values.items() if len(own) != sum(sizes)}
        if wrong:
            raise ContractError(f"track {track} holds {sum(sizes)} samples, the values to attach have {wrong}")
        cut = {name: _cut(values, sizes) for name, values in fields.items()}
        shares = [{name: parts[shard] for name, parts in cut.items()} for shard in range(len(sizes))]
        self._runtime.map_held(self.key_for(self._runtime), _attach, [(track, share) for share in shares])
        self._metas = [meta.with_values(track, **own) for meta, own in zip(self._metas, shares, strict=True)]

    def keep(self, track: str, rows: Sequence[int]) -> None:
        """Leave of a track only the samples at `rows`, in their order, and what grew from them. The rows of each worker
        stay with it."""
        ends = [0, *itertools.accumulate(meta.track(track).batch_size for meta in self._metas)]
        own = [[row - start for row in rows if start <= row < end] for start, end in itertools.pairwise(ends)]
        self._runtime.map_held(self.key_for(self._runtime), _keep, [(track, each) for each in own])
        self._metas = [meta.select_of(track, each) for meta, each in zip(self._metas, own, strict=True)]

    def refresh(self) -> None:
        """Read the metadata again after a role has changed the held value."""
        self._metas = self.map(_metadata)

    def write(self, folder: Path, name: str) -> None:
        """Write every shard to the file `NAME-<shard>.safetensors` of a folder that all workers share, which
        `Runtime.read` reads. Raises ContractError for what no file can hold (`unirl.types.storage`)."""
        paths = [folder / f"{name}-{shard:05d}.safetensors" for shard in range(len(self._metas))]
        self._runtime.write(self.key_for(self._runtime), paths)

    def fetch(self) -> Any:  # Any: the result type of the method collected by HOLD
        """Copy the whole value to this process, shards joined in order. Expensive; the workers keep their shares."""
        return collected(Collect.CONCAT, self.map(_itself))

    def release(self) -> None:
        """Free the value on every worker. Safe to call twice, and after the runtime has closed."""
        if not self._is_released and not self._runtime.is_closed:
            self._runtime.release(self.key)
        self._is_released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __reduce__(self) -> NoReturn:
        raise ContractError(
            "a held value travels as a direct argument of a role's method only, not inside a list, dict or object"
        )


def _itself(value: ResultT) -> ResultT:
    return value


def _metadata(resp: RolloutResp) -> RolloutResp:
    return resp.metadata_only()


def _cut(values: Tensor | Mapping[str, Tensor], sizes: list[int]) -> Sequence[Tensor | dict[str, Tensor]]:
    """The rows of each shard."""
    if not isinstance(values, Mapping):
        return values.split(sizes)
    cut = {name: own.split(sizes) for name, own in values.items()}
    return [{name: parts[shard] for name, parts in cut.items()} for shard in range(len(sizes))]


def _attach(resp: RolloutResp, track: str, fields: dict[str, Tensor | dict[str, Tensor]]) -> None:
    resp.tracks[track] = resp.tracks[track].replace(**fields)


def _keep(resp: RolloutResp, track: str, rows: list[int]) -> None:
    resp.tracks.update(resp.select_of(track, rows).tracks)


class Future(Generic[ResultT]):
    """The result of a submitted call. Call `result` of every future: a local runtime runs the call only then."""

    def __init__(self, compute: Callable[[], ResultT]) -> None:
        self._compute: Callable[[], ResultT] | None = compute
        self._results: list[ResultT] = []
        self._error: Exception | None = None

    def result(self) -> ResultT:
        """Wait for the call and return its result, the same one each time.

        Raises what the call raises, and ContractError if the runtime was closed before the result was requested.
        """
        if self._compute is not None:
            try:
                self._results.append(self._compute())
            except Exception as error:  # noqa: BLE001 (raised below, each time)
                self._error = error
            self._compute = None
        if self._error is not None:
            raise self._error
        return self._results[0]
