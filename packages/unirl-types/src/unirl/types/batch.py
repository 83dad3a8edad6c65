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
import functools
import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from unirl.types.errors import ContractError

KeyT = TypeVar("KeyT", bound=Hashable)


def rows_by(keys: Iterable[KeyT]) -> dict[KeyT, list[int]]:
    """The rows of each key, given every row's; keys in order of first appearance."""
    rows: dict[KeyT, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows


class Kind(Enum):
    """How a field behaves when batches are concatenated or selected from."""

    PER_SAMPLE = "per_sample"
    SHARED = "shared"
    PACKED = "packed"
    PEAK = "peak"


_MISSING = dataclasses.MISSING

Indices = Sequence[int] | Tensor | slice
"""What `select` takes: integers (a sequence or an int64 tensor [N]) or a Python slice."""


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


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The same selection twice: Python integers for lists, an int64 CPU tensor for tensors."""

    positions: list[int]
    index: Tensor


def _rows(indices: Indices, size: int, owner: str) -> _Rows:
    """Checked, non-negative rows. Booleans are refused: a mask read as 0 and 1 would select the wrong samples."""
    if isinstance(indices, slice):
        positions = list(range(*indices.indices(size)))
    elif isinstance(indices, Tensor):
        if indices.ndim != 1 or indices.dtype == torch.bool or indices.is_floating_point() or indices.is_complex():
            raise ContractError(
                f"select takes integer indices [N], got {indices.dtype} {tuple(indices.shape)}. "
                "Of a mask, pass mask.nonzero().flatten()."
            )
        positions = indices.tolist()
    else:
        if any(isinstance(i, bool) for i in indices):
            raise ContractError("select takes integer indices, got booleans. Pass the positions of a mask instead.")
        positions = [operator.index(i) for i in indices]
    for position in positions:
        if not -size <= position < size:
            raise IndexError(f"sample {position} of a {owner} of {size}")
    positions = [position % size for position in positions]
    return _Rows(positions, torch.tensor(positions, dtype=torch.long))


def _select(value: Any, rows: _Rows) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(0, rows.index.to(value.device))
    if isinstance(value, Batch):
        return value.select(rows.positions)
    if isinstance(value, list):
        return [value[i] for i in rows.positions] if value else []
    if isinstance(value, dict):
        return {key: _select(item, rows) for key, item in value.items()}
    if value is None:
        return None
    raise ContractError(f"a per-sample field holds a {type(value).__name__}; use a tensor, list, dict or Batch")


def _concat(values: list[Any], where: str) -> Any:
    first = values[0]
    absent = [value is None for value in values]
    if all(absent):
        return None
    if any(absent):
        raise ContractError(f"{where}: present in {absent.count(False)} shards and absent in {absent.count(True)}")
    kinds = sorted({type(value).__name__ for value in values if not isinstance(value, Tensor)})
    if len(kinds) > 1 or (kinds and any(isinstance(value, Tensor) for value in values)):
        raise ContractError(f"{where}: shards hold different types: {[type(value).__name__ for value in values]}")
    if isinstance(first, Tensor):
        for what, found in (
            ("past dimension 0", {str(list(value.shape[1:])) for value in values}),
            ("on the dtype", {str(value.dtype) for value in values}),
            ("on the device", {str(value.device) for value in values}),
        ):
            if len(found) > 1:
                raise ContractError(f"{where}: shards disagree {what}: {sorted(found)}")
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


def _sizes(value: Any, where: str) -> Iterator[tuple[str, int]]:
    """(name, number of samples) of everything inside a per-sample field. None and an empty list count as absent."""
    if isinstance(value, Tensor):
        if value.ndim == 0:
            raise ContractError(f"{where} is a scalar tensor; dimension 0 must be the sample axis")
        yield where, value.shape[0]
    elif isinstance(value, Batch):
        yield where, value.batch_size
    elif isinstance(value, list):
        if value:
            yield where, len(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _sizes(item, f"{where}[{key}]")
    elif value is not None:
        raise ContractError(f"{where} holds a {type(value).__name__}; use a tensor, list, dict or Batch")


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


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    """Equality of bits, so that NaN equals itself and 0.0 differs from -0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.device != right.device:
        left, right = left.cpu(), right.cpu()
    left, right = left.detach().contiguous().flatten(), right.detach().contiguous().flatten()
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def same_value(left: Any, right: Any) -> bool:
    """True if two field values are equal: tensors bit for bit on any device, batches and dataclasses field for field.

    NaN equals NaN, so a value always equals its copy.
    """
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and _same_bytes(left, right)
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
    if dataclasses.is_dataclass(left) and type(left) is type(right):
        return all(
            same_value(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(left)
        )
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def _check_boundaries(cu_seqlens: Tensor, owner: str) -> None:
    if cu_seqlens.dtype != torch.long or cu_seqlens.ndim != 1 or cu_seqlens.device.type != "cpu":
        raise ContractError(
            f"{owner}: cu_seqlens must be int64 [B+1] on the CPU, got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} on "
            f"{cu_seqlens.device}"
        )
    if cu_seqlens.numel() == 0 or int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 0).any()):
        raise ContractError(f"{owner}: cu_seqlens must start with 0 and never fall, got {cu_seqlens.tolist()}")


@functools.cache
def _kinds_of(cls: type[Batch]) -> Mapping[str, Kind]:
    found = {}
    for field in dataclasses.fields(cls):
        if field.name == "_cu_seqlens":
            continue
        if "kind" not in field.metadata:
            raise TypeError(f"{cls.__name__}.{field.name} declares no kind; use per_sample, shared, packed or peak")
        found[field.name] = field.metadata["kind"]
    return MappingProxyType(found)


@dataclasses.dataclass(kw_only=True, eq=False)
class Batch:
    """A dataclass whose fields declare how they batch. Subclass with `@dataclass(kw_only=True, eq=False)`.

    Packed fields of one instance share one `cu_seqlens`; build such an instance with `pack`. An empty list in a
    per-sample field means that the field is absent.

    Assigning a field runs the checks again and leaves the old value where they fail; assigning anything else raises
    AttributeError. To change several fields at once, use `replace`.
    Raises ContractError if per-sample fields disagree on the number of samples.
    """

    _cu_seqlens: Tensor | None = dataclasses.field(default=None, repr=False, metadata={"kind": None})

    @classmethod
    def kinds(cls) -> Mapping[str, Kind]:
        """Field name -> kind, in declaration order. Raises TypeError for a field that declares none."""
        return _kinds_of(cls)

    def __post_init__(self) -> None:
        owner = type(self).__name__
        sizes: dict[str, int] = {}
        if self._cu_seqlens is not None:
            _check_boundaries(self._cu_seqlens, owner)
        for name, kind in self.kinds().items():
            value = getattr(self, name)
            if kind is Kind.PER_SAMPLE:
                sizes.update(_sizes(value, name))
            elif kind is Kind.PACKED and value is not None:
                if self._cu_seqlens is None:
                    raise ContractError(f"{owner}.{name} is packed: build it with {owner}.pack")
                total = int(self._cu_seqlens[-1])
                if value.ndim == 0 or value.shape[0] != total:
                    raise ContractError(
                        f"{owner}.{name} has shape {tuple(value.shape)} but cu_seqlens ends at {total} rows"
                    )
                sizes[name] = self._cu_seqlens.numel() - 1
        if len(set(sizes.values())) > 1:
            raise ContractError(f"{owner}: fields disagree on the number of samples: {sizes}")

    def __setattr__(self, name: str, value: Any) -> None:
        state = vars(self)
        if name not in state:
            if name != "_cu_seqlens" and name not in self.kinds():
                raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {list(self.kinds())}")
            object.__setattr__(self, name, value)  # __init__ sets every field once, then checks
            return
        before = state[name]
        object.__setattr__(self, name, value)
        try:
            self.__post_init__()
        except ContractError:
            object.__setattr__(self, name, before)
            raise

    # Structure ---------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Number of samples; 0 for an empty batch."""
        if self._cu_seqlens is not None:
            return self._cu_seqlens.numel() - 1
        for name, kind in self.kinds().items():
            if kind is Kind.PER_SAMPLE:
                for _, size in _sizes(getattr(self, name), name):
                    return size
        return 0

    def __len__(self) -> int:
        return self.batch_size

    @property
    def cu_seqlens(self) -> Tensor:
        """Boundaries of the packed samples, int64 [B+1] on the CPU, starting with 0."""
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

        Raises ContractError if two packed fields have different lengths for the same sample.
        """
        kinds = cls.kinds()
        lengths: list[int] | None = None
        ready: dict[str, Any] = {}
        for name, value in fields.items():
            if kinds.get(name) is not Kind.PACKED or value is None:
                ready[name] = value
                continue
            if not value:
                raise ContractError(f"{cls.__name__}.{name}: cannot pack an empty list, the dtype would be unknown")
            if any(item.ndim == 0 for item in value):
                raise ContractError(f"{cls.__name__}.{name}: cannot pack scalars; every sample needs a dimension 0")
            own = [item.shape[0] for item in value]
            if lengths is not None and own != lengths:
                raise ContractError(f"{cls.__name__}.{name} has lengths {own}; another packed field has {lengths}")
            lengths = own
            ready[name] = _concat(list(value), f"{cls.__name__}.{name}")
        if lengths is None:
            raise ContractError(f"{cls.__name__}.pack needs at least one packed field")
        boundaries = torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
        return cls(_cu_seqlens=boundaries, **ready)

    def unpack(self, name: str) -> list[Tensor]:
        """The rows of one packed field, one tensor per sample (views). Raises ContractError for any other field."""
        value = getattr(self, name) if self.kinds().get(name) is Kind.PACKED else None
        if value is None:
            raise ContractError(f"{type(self).__name__}.{name} is not a packed field with a value")
        return list(value.split(self.lengths.tolist(), dim=0))

    # Derived operations ------------------------------------------------------------------------------------------

    def select(self, indices: Indices) -> Self:
        """A copy of the samples at `indices`, in that order (repeats allowed, negative ones count from the end).

        Raises IndexError outside the batch, ContractError for a boolean mask.
        """
        rows = _rows(indices, self.batch_size, type(self).__name__)
        boundaries = None
        gather = None
        if self._cu_seqlens is not None:
            lengths = self.lengths[rows.index]
            boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            shift = self._cu_seqlens[:-1][rows.index] - boundaries[:-1]
            gather = torch.arange(int(boundaries[-1])) + shift.repeat_interleave(lengths)
        values: dict[str, Any] = {}
        for name, kind in self.kinds().items():
            value = getattr(self, name)
            if kind is Kind.PER_SAMPLE:
                values[name] = _select(value, rows)
            elif kind is Kind.PACKED and value is not None and gather is not None:
                values[name] = value.index_select(0, gather.to(value.device))
            else:
                values[name] = value
        return type(self)(_cu_seqlens=boundaries, **values)

    def slice(self, start: int, stop: int) -> Self:
        """A copy of samples start..stop-1, with the rules of a Python slice."""
        return self.select(slice(start, stop))

    def repeat_interleave(self, repeats: int) -> Self:
        """Every sample `repeats` times, copies next to each other."""
        if repeats < 1:
            raise ContractError(f"repeats must be at least 1, got {repeats}")
        return self.select([i for i in range(self.batch_size) for _ in range(repeats)])

    @classmethod
    def concat(cls, batches: Iterable[Self]) -> Self:
        """Join shards in order; a single shard is returned as it is.

        Raises ContractError if shared fields differ, or types, shapes or dtypes disagree.
        """
        parts = list(batches)
        if not parts:
            raise ContractError(f"cannot concatenate zero {cls.__name__}s")
        owners = {type(part) for part in parts}
        if len(owners) > 1:
            raise ContractError(f"cannot join {sorted(owner.__name__ for owner in owners)} into one batch")
        if cls not in owners:
            return type(parts[0]).concat(parts)
        if len(parts) == 1:
            return parts[0]
        parts = cls._align(parts)
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
    def concat_rows(cls, parts: Sequence[tuple[Sequence[int], Self]]) -> Self:
        """Join parts, each with the rows that it holds of the whole, as `rows_by` gives them: in the order of the rows.

        Raises ContractError as `concat`.
        """
        order = [row for rows, _ in parts for row in rows]
        places = sorted(range(len(order)), key=order.__getitem__)
        return cls.concat([part for _, part in parts]).select(places)

    @classmethod
    def _align(cls, parts: list[Self]) -> list[Self]:
        """Hook for containers whose shards must be padded to one shape before they join."""
        return parts

    def map_tensors(self, function: Any) -> Self:
        """A copy with `function` applied to every tensor, nested ones included (boundaries stay on the CPU)."""
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
        """Field-for-field equality with a batch of the same type, tensors bit for bit."""
        return (
            type(self) is type(other)
            and same_value(self._cu_seqlens, other._cu_seqlens)
            and all(same_value(getattr(self, name), getattr(other, name)) for name in self.kinds())
        )
