"""Results of calls: one that stays with the workers that made it, and one that is not there yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

from torch import Tensor

from unirl.distributed.dispatch import HeldKey, collected
from unirl.types.errors import ContractError
from unirl.types.roles import Collect
from unirl.types.rollout import RolloutResp

ResultT = TypeVar("ResultT")


class Holder(Protocol):
    """Workers that hold values: what is asked of the runtime of a `Held`."""

    @property
    def is_closed(self) -> bool:
        """Whether the workers were stopped."""
        ...

    def map_held(
        self, key: HeldKey, function: Callable[..., ResultT], shard_args: Sequence[tuple[Any, ...]]
    ) -> list[ResultT]:
        """function(value, *args) on every worker's own held value, with the args of its shard; one result per shard."""
        ...

    def gather(self, sources: Sequence[tuple[Held, Sequence[int]]]) -> Held:
        """A new held value of some samples of others, cut evenly over these workers: (value, rows) in order."""
        ...

    def pick_rows(self, calls: Sequence[tuple[int, HeldKey, tuple[int, ...]]]) -> list[Any]:  # Any: also references
        """Rows of held values, (shard, key, rows): the rows, or references that workers of the same kind read."""
        ...

    def release(self, key: HeldKey) -> None:
        """Forget a held value on every worker."""
        ...


class Held:
    """A result that stays with its producers; the driver has its ids and versions, and what it has attached itself.

    Where a run has several groups of workers (`unirl.distributed.groups`), it moves to the one that is called with it.
    """

    def __init__(self, runtime: Holder, key: HeldKey, metas: list[RolloutResp]) -> None:
        self._runtime = runtime
        self._metas = metas
        self._is_released = False
        self.key = key

    @property
    def meta(self) -> RolloutResp:
        """The metadata of all shards, in order."""
        return collected(Collect.CONCAT, self._metas)

    @property
    def runtime(self) -> Holder:
        """Whose workers hold the value."""
        return self._runtime

    @property
    def metas(self) -> Sequence[RolloutResp]:
        """The metadata of each shard."""
        return self._metas

    def key_for(self, runtime: Holder) -> HeldKey:
        """The key, for a call on `runtime`. Raises ContractError where the value does not lie with its workers."""
        if self._is_released:
            raise ContractError(f"held value {self.key.number} was released before it was used")
        if runtime is not self._runtime:
            raise ContractError(
                f"held value {self.key.number} lies with other workers; give them one of their own with gather"
            )
        return self.key

    def move_to(self, runtime: Holder) -> None:
        """Let the workers of another runtime hold the value from now on, cut over them; rows go from worker to worker.

        Raises ContractError where its samples do not divide over them.
        """
        if runtime is self._runtime:
            return
        moved = runtime.gather([(self, range(sum(meta.batch_size for meta in self._metas)))])
        self.release()
        self._runtime, self.key, self._metas, self._is_released = runtime, moved.key, moved._metas, False

    def map(self, function: Callable[..., ResultT], *args: Any) -> list[ResultT]:
        """function(value, *args) where the value lies; one result per shard. `function` must pickle.

        Ranks that hold the same shard all run it, so that it may change the value.
        """
        return self._runtime.map_held(self.key_for(self._runtime), function, [args] * len(self._metas))

    def attach(self, track: str, **fields: Tensor) -> None:
        """Write values of all samples of a track, [B, ...] each, into it where it lies; every shard gets its own rows.

        Raises ContractError where the sizes disagree.
        """
        sizes = [meta.track(track).batch_size for meta in self._metas]
        wrong = {name: len(values) for name, values in fields.items() if len(values) != sum(sizes)}
        if wrong:
            raise ContractError(f"track {track} holds {sum(sizes)} samples, the values to attach have {wrong}")
        cut = {name: values.split(sizes) for name, values in fields.items()}
        shares = [{name: parts[shard] for name, parts in cut.items()} for shard in range(len(sizes))]
        self._runtime.map_held(self.key_for(self._runtime), _attach, [(track, share) for share in shares])
        self._metas = [meta.with_values(track, **own) for meta, own in zip(self._metas, shares, strict=True)]

    def refresh(self) -> None:
        """Read the metadata anew, after a role has written into the value where it lies."""
        self._metas = self.map(_metadata)

    def fetch(self) -> Any:  # Any: what the method that was collected by HOLD returns
        """The whole value in this process: the shards in order, joined. Heavy; the workers keep theirs."""
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


def _attach(resp: RolloutResp, track: str, fields: dict[str, Tensor]) -> None:
    resp.tracks[track] = resp.tracks[track].replace(**fields)


class Future(Generic[ResultT]):
    """The result of a call that was submitted. Ask every future: on a local runtime nothing happens before."""

    def __init__(self, compute: Callable[[], ResultT]) -> None:
        self._compute: Callable[[], ResultT] | None = compute
        self._results: list[ResultT] = []
        self._error: Exception | None = None

    def result(self) -> ResultT:
        """Wait for the call and return its result, the same one each time.

        Raises what the call raises, and ContractError where the runtime was closed before the call was asked for.
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
