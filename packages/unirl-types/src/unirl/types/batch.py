"""Containers that know how their fields batch.

Every field of a `Batch` declares a kind:

    per_sample   dimension 0 (or the list index) is the sample axis; dicts and nested batches recurse
    shared       one value for the whole batch; must be equal on every shard
    packed       ragged along dimension 0, all samples end to end; boundaries in `cu_seqlens` [B+1]
    peak         a number merged by maximum (timings)

Concatenation, selection, slicing and repetition follow from the kinds: shards concatenated equal the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from unirl.types.errors import ContractError


class Kind(Enum):
    """How a field behaves when batches are concatenated or selected from."""

    PER_SAMPLE = "per_sample"
    SHARED = "shared"
    PACKED = "packed"
    PEAK = "peak"


_MISSING = dataclasses.MISSING


def _field(kind: Kind, default: Any, default_factory: Any) -> Any:  # Any: dataclasses.field is typed so
    if default_factory is not _MISSING:
        return dataclasses.field(default_factory=default_factory, metadata={"kind": kind})
    return dataclasses.field(default=default, metadata={"kind": kind})


def per_sample(*, default: Any = _MISSING, default_factory: Any = _MISSING) -> Any:
    """A field whose dimension 0 (or list index) is the sample axis."""
    return _field(Kind.PER_SAMPLE, default, default_factory)


def shared(*, default: Any = _MISSING, default_factory: Any = _MISSING) -> Any:
    """A field with one value for the whole batch."""
    return _field(Kind.SHARED, default, default_factory)


def packed(*, default: Any = _MISSING, default_factory: Any = _MISSING) -> Any:
    """A field whose samples lie end to end along dimension 0."""
    return _field(Kind.PACKED, default, default_factory)


def peak(*, default: Any = _MISSING, default_factory: Any = _MISSING) -> Any:
    """A number that merges by maximum."""
    return _field(Kind.PEAK, default, default_factory)


def _select(value: Any, indices: list[int]) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value[torch.tensor(indices, dtype=torch.long, device=value.device)]
    if isinstance(value, Batch):
        return value.select(indices)
    if isinstance(value, list):
        return [value[i] for i in indices]
    if isinstance(value, dict):
        return {key: _select(item, indices) for key, item in value.items()}
    raise ContractError(f"a per-sample field holds a {type(value).__name__}; use a tensor, list, dict or Batch")


def _concat(values: list[Any], where: str) -> Any:
    first = values[0]
    absent = [value is None for value in values]
    if all(absent):
        return None
    if any(absent):
        raise ContractError(f"{where}: present in {absent.count(False)} shards and absent in {absent.count(True)}")
    if isinstance(first, Tensor):
        shapes = {tuple(value.shape[1:]) for value in values}
        if len(shapes) > 1:
            raise ContractError(f"{where}: shards disagree past dimension 0: {sorted(shapes)}")
        return torch.cat(values, dim=0)
    if isinstance(first, Batch):
        return type(first).concat(values)
    if isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, dict):
        keys = set(first)
        if any(set(value) != keys for value in values):
            raise ContractError(f"{where}: shards have different keys: {[sorted(value) for value in values]}")
        return {key: _concat([value[key] for value in values], f"{where}[{key}]") for key in first}
    raise ContractError(f"{where}: cannot concatenate {type(first).__name__}")


def _length(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.shape[0]
    if isinstance(value, Batch):
        return value.batch_size
    if isinstance(value, list):
        return len(value)
    if isinstance(value, dict):
        for item in value.values():
            size = _length(item)
            if size is not None:
                return size
    return None


def _map_tensors(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Batch):
        return value.map_tensors(function)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_tensors(item, function) for item in value]
    if isinstance(value, tuple):
        return tuple(_map_tensors(item, function) for item in value)
    return value


def same_value(left: Any, right: Any) -> bool:
    """Whether two field values are equal, tensors bit for bit, batches field for field."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return (
            isinstance(left, Tensor)
            and isinstance(right, Tensor)
            and left.dtype == right.dtype
            and torch.equal(left, right)
        )
    if isinstance(left, Batch):
        return type(left) is type(right) and left.equals(right)
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(same_value(left[key], right[key]) for key in left)
        )
    if isinstance(left, (list, tuple)):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same_value(a, b) for a, b in zip(left, right, strict=True))
        )
    return bool(left == right)


@dataclasses.dataclass(kw_only=True, eq=False)
class Batch:
    """A dataclass whose fields declare how they batch. Subclass with `@dataclass(kw_only=True, eq=False)`.

    Packed fields of one instance share one `cu_seqlens`; build such an instance with `pack`.
    Raises ContractError where per-sample fields disagree on the number of samples.
    """

    _cu_seqlens: Tensor | None = dataclasses.field(default=None, repr=False, metadata={"kind": None})

    _kinds: ClassVar[dict[str, Kind]]

    @classmethod
    def kinds(cls) -> dict[str, Kind]:
        """Field name -> kind, in declaration order. Raises TypeError for a field that declares none."""
        found = {}
        for field in dataclasses.fields(cls):
            if field.name == "_cu_seqlens":
                continue
            if "kind" not in field.metadata:
                raise TypeError(f"{cls.__name__}.{field.name} declares no kind; use per_sample, shared, packed or peak")
            found[field.name] = field.metadata["kind"]
        return found

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for name, kind in self.kinds().items():
            value = getattr(self, name)
            if kind is Kind.PER_SAMPLE:
                size = _length(value)
                if size is not None and not (isinstance(value, list) and size == 0):
                    sizes[name] = size
            elif kind is Kind.PACKED and value is not None:
                if self._cu_seqlens is None:
                    raise ContractError(
                        f"{type(self).__name__}.{name} is packed: build it with {type(self).__name__}.pack"
                    )
                total = int(self._cu_seqlens[-1])
                if value.shape[0] != total:
                    raise ContractError(
                        f"{type(self).__name__}.{name} has {value.shape[0]} rows but cu_seqlens ends at {total}"
                    )
                sizes[name] = self._cu_seqlens.numel() - 1
        if len(set(sizes.values())) > 1:
            raise ContractError(f"{type(self).__name__}: fields disagree on the number of samples: {sizes}")

    # Structure ---------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Number of samples; 0 for an empty batch."""
        if self._cu_seqlens is not None:
            return self._cu_seqlens.numel() - 1
        for name, kind in self.kinds().items():
            if kind is Kind.PER_SAMPLE:
                size = _length(getattr(self, name))
                if size:
                    return size
        return 0

    def __len__(self) -> int:
        return self.batch_size

    @property
    def cu_seqlens(self) -> Tensor:
        """Boundaries of the packed samples, int64 [B+1], starting with 0."""
        if self._cu_seqlens is None:
            raise ContractError(f"this {type(self).__name__} holds no packed field")
        return self._cu_seqlens

    @property
    def lengths(self) -> Tensor:
        """Rows of each packed sample, int64 [B]."""
        return self.cu_seqlens.diff()

    @classmethod
    def pack(cls, **fields: Any) -> Self:
        """Build from per-sample lists of tensors for the packed fields; other fields are passed as they are.

        Raises ContractError where two packed fields have different lengths for the same sample.
        """
        kinds = cls.kinds()
        lengths: list[int] | None = None
        ready: dict[str, Any] = {}
        for name, value in fields.items():
            if kinds.get(name) is not Kind.PACKED or value is None:
                ready[name] = value
                continue
            own = [item.shape[0] for item in value]
            if lengths is not None and own != lengths:
                raise ContractError(f"{cls.__name__}.{name} has lengths {own}; another packed field has {lengths}")
            lengths = own
            if not value:
                raise ContractError(f"{cls.__name__}.{name}: cannot pack an empty list, the dtype would be unknown")
            ready[name] = torch.cat(list(value), dim=0)
        if lengths is None:
            raise ContractError(f"{cls.__name__}.pack needs at least one packed field")
        boundaries = torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
        return cls(_cu_seqlens=boundaries, **ready)

    def unpack(self, name: str) -> list[Tensor]:
        """The rows of one packed field, one tensor a sample."""
        value = getattr(self, name)
        return list(value.split(self.lengths.tolist(), dim=0))

    # Derived operations ------------------------------------------------------------------------------------------

    def select(self, indices: Sequence[int] | Tensor) -> Self:
        """The samples at `indices`, in that order (repeats allowed). Raises IndexError outside the batch."""
        rows = [int(i) for i in indices]
        size = self.batch_size
        for row in rows:
            if not -size <= row < size:
                raise IndexError(f"sample {row} of a {type(self).__name__} of {size}")
        rows = [row % size for row in rows] if size else rows
        values: dict[str, Any] = {}
        boundaries = None
        gather = None
        if self._cu_seqlens is not None:
            starts = self._cu_seqlens.tolist()
            boundaries = torch.tensor([0, *(starts[i + 1] - starts[i] for i in rows)], dtype=torch.long).cumsum(0)
            gather = [position for i in rows for position in range(starts[i], starts[i + 1])]
        for name, kind in self.kinds().items():
            value = getattr(self, name)
            if kind is Kind.PER_SAMPLE:
                values[name] = _select(value, rows) if _length(value) else value
            elif kind is Kind.PACKED and value is not None:
                values[name] = _select(value, gather if gather is not None else [])
            else:
                values[name] = value
        return type(self)(_cu_seqlens=boundaries, **values)

    def slice(self, start: int, stop: int) -> Self:
        """Samples start..stop-1."""
        return self.select(range(*slice(start, stop).indices(self.batch_size)))

    def repeat_interleave(self, repeats: int) -> Self:
        """Every sample `repeats` times, copies next to each other."""
        if repeats < 1:
            raise ContractError(f"repeats must be at least 1, got {repeats}")
        return self.select([i for i in range(self.batch_size) for _ in range(repeats)])

    @classmethod
    def concat(cls, batches: Iterable[Self]) -> Self:
        """Join shards in order. Raises ContractError where shared fields differ or shapes disagree."""
        parts = cls._align(list(batches))
        if not parts:
            raise ContractError(f"cannot concatenate zero {cls.__name__}s")
        if len(parts) == 1:
            return parts[0]
        values: dict[str, Any] = {}
        for name, kind in cls.kinds().items():
            column = [getattr(part, name) for part in parts]
            where = f"{cls.__name__}.{name}"
            if kind is Kind.SHARED:
                for other in column[1:]:
                    if not same_value(column[0], other):
                        raise ContractError(f"{where} is shared but shards disagree: {column[0]!r} and {other!r}")
                values[name] = column[0]
            elif kind is Kind.PEAK:
                values[name] = max(column)
            else:
                values[name] = _concat(column, where)
        boundaries = None
        if parts[0]._cu_seqlens is not None:
            lengths = torch.cat([part.lengths for part in parts])
            boundaries = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        return cls(_cu_seqlens=boundaries, **values)

    @classmethod
    def _align(cls, parts: list[Self]) -> list[Self]:
        """Hook for containers whose shards must be padded to one shape before they join."""
        return parts

    def map_tensors(self, function: Any) -> Self:
        """A copy with `function` applied to every tensor, nested ones included (boundaries excepted)."""
        values = {name: _map_tensors(getattr(self, name), function) for name in self.kinds()}
        return type(self)(_cu_seqlens=self._cu_seqlens, **values)

    def clone(self) -> Self:
        """A deep copy of the tensors."""
        return self.map_tensors(lambda tensor: tensor.clone())

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device))

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed (checked again)."""
        return dataclasses.replace(self, **changes)

    def equals(self, other: Self) -> bool:
        """Field-for-field equality, tensors bit for bit."""
        return same_value(self._cu_seqlens, other._cu_seqlens) and all(
            same_value(getattr(self, name), getattr(other, name)) for name in self.kinds()
        )
