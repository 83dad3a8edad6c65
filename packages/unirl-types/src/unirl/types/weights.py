"""Weights on their way from the trainer to an engine: buckets of named tensors with what the receiver must check."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, Self, TypeVar

import torch
import xxhash
from torch import Tensor

from unirl.types.devices import has_values, is_accelerator
from unirl.types.errors import WeightSyncError
from unirl.types.word_sums import word_sums

SumKind = Literal["xxh3_128", "words_128"]
"""How a tensor's bytes are summed: by XXH3 on the host, or by `unirl.types.word_sums`, which any device computes."""


def sum_kind(device: torch.device) -> SumKind:
    """The checksum that is fastest for tensors on a device."""
    return "words_128" if is_accelerator(device) and has_values(device) else "xxh3_128"


@dataclass(frozen=True)
class WeightSpec:
    """Name, shape, dtype and checksum of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: str
    stops: tuple[int, ...] = ()
    """Rows at which the pieces end that it was sent in, each with a checksum, of which `checksum` is one; empty for one
    piece."""
    sum_kind: SumKind = "xxh3_128"
    """How `checksum` was computed; whoever checks it computes the same."""

    def of(self, tensor: Tensor, checksum: str) -> Self:
        """The spec of a tensor that came as this one, with its checksum."""
        return replace(self, shape=tuple(tensor.shape), dtype=str(tensor.dtype), checksum=checksum)


WeightsPlace = Literal["host", "kept", "device"]
"""Where tensors are that a policy is read by: all in host memory; those that are neither sharded nor merged where they
lie, and the others in host memory; or all on the device, where they are gathered and merged."""


@dataclass(frozen=True, eq=False)
class WeightShard:
    """Rows of a tensor of the model, as one rank of training has them."""

    name: str
    shape: tuple[int, ...]
    """The whole tensor's."""
    start: int
    """Its first row."""
    rows: Tensor
    """Where they lie; a tensor without dimensions is one row."""


PublishedParts = Mapping[str, tuple[int, slice]]
"""Name of a tensor in the published checkpoint -> entry of a stack that it lies in, and which rows of it."""


def in_published_parts(
    tensors: Mapping[str, Tensor], stacks: Mapping[str, PublishedParts], prefix: str = ""
) -> dict[str, Tensor]:
    """The tensors, and of stacks instead their parts by their published names, sharing memory.

    stacks: by the name of the tensor after `prefix`, see unirl.types.protocols.models.StacksWeights.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = stacks.get(f"{prefix}{name}")
        if parts is None:
            found[name] = tensor
        else:
            found.update({part: tensor[entry, rows] for part, (entry, rows) in parts.items()})
    return found


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the dtype that an engine samples with; one of integers or booleans as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def tensor_checksums(
    tensors: Iterable[Tensor], kind: SumKind, stops: Iterable[Sequence[int]] | None = None
) -> list[str]:
    """Checksums of the tensors' bytes (row-major), the same on every device: 32 hexadecimal digits each.

    tensors: taken one by one. stops: for each tensor the rows at which its pieces
    end, see `WeightSpec`; its checksum is then one of theirs. None: all are in one piece.
    It finds what transports and bugs do to weights; it is no proof against a forger.
    Raises WeightSyncError for an unknown kind.
    """
    if stops is None:
        return _sums(tensors, kind)
    counts: list[int] = []

    def pieces() -> Iterator[Tensor]:
        for tensor, ends in zip(tensors, stops, strict=True):
            counts.append(max(1, len(ends)))
            yield from [tensor[start:stop] for start, stop in pairwise((0, *ends))] if ends else [tensor]

    of_each = iter(_sums(pieces(), kind))
    return [joined_checksum([next(of_each) for _ in range(count)]) for count in counts]


def _sums(tensors: Iterable[Tensor], kind: SumKind) -> list[str]:
    match kind:
        case "xxh3_128":
            return [_xxh3(tensor) for tensor in tensors]
        case "words_128":
            return word_sums(tensors)
        case other:
            raise WeightSyncError(f"checksums are of the kind {other!r}; install the same unirl-types on both sides")


def tensor_checksum(tensor: Tensor) -> str:
    """XXH3 (128 bits, hexadecimal) of a tensor's bytes (row-major). As fast as memory of the host is read."""
    return tensor_checksums([tensor], "xxh3_128")[0]


def _xxh3(tensor: Tensor) -> str:
    data = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy())


def joined_checksum(pieces: Sequence[str]) -> str:
    """The checksum of a tensor by those of its pieces."""
    return pieces[0] if len(pieces) == 1 else xxhash.xxh3_128_hexdigest("".join(pieces).encode())


def weight_specs(tensors: Mapping[str, Tensor]) -> list[WeightSpec]:
    """What a receiver must find for these tensors. The checksum of each is the fastest where it lies."""
    found: list[WeightSpec] = []
    for kind, of_kind in itertools.groupby(tensors.items(), key=lambda item: sum_kind(item[1].device)):
        same = dict(of_kind)
        sums = tensor_checksums(same.values(), kind)
        found += [
            WeightSpec(name, tuple(tensor.shape), str(tensor.dtype), checksum, sum_kind=kind)
            for (name, tensor), checksum in zip(same.items(), sums, strict=True)
        ]
    return found


def weight_spec(name: str, tensor: Tensor) -> WeightSpec:
    """What a receiver must find for this tensor, see `weight_specs`."""
    kind = sum_kind(tensor.device)
    return WeightSpec(name, tuple(tensor.shape), str(tensor.dtype), _sums([tensor], kind)[0], sum_kind=kind)


def checksums_as(specs: Sequence[WeightSpec], tensors: Iterable[Tensor]) -> list[str]:
    """Checksums of tensors, of the kind and the pieces that each spec says.

    tensors: one per spec, taken one by one. Raises WeightSyncError for an unknown kind.
    """
    given, found = iter(tensors), list[str]()
    for kind, of_kind in itertools.groupby(specs, key=lambda spec: spec.sum_kind):
        same = list(of_kind)
        stops = [spec.stops for spec in same]
        found += tensor_checksums(itertools.islice(given, len(same)), kind, stops if any(stops) else None)
    return found


@dataclass(frozen=True)
class WeightReceipt:
    """What an engine says after weights were loaded."""

    policy_version: int
    """Version of the policy that it generates with from now on."""
    num_tensors: int
    """Tensors that arrived."""
    num_bytes: int
    num_bound: int | None
    """Parameters of the engine's own model that took values from them (fused ones count once); for an adapter, layers
    that it acts on. None where the engine cannot say."""


@dataclass(frozen=True)
class LostUpdate:
    """What rounding took of the updates that adapters make, over all weights that they were merged into."""

    dtype: str
    """Dtype of the merged weights, such as `bfloat16`."""
    norm_fraction: float
    """Norm of what was lost over the norm of the update."""
    unchanged_fraction: float
    """Fraction of the weights changed by the update that equal the base's again."""

    def __str__(self) -> str:
        return (
            f"Rounding to {self.dtype} took {self.norm_fraction:.2%} of the update's norm; "
            f"{self.unchanged_fraction:.2%} of the weights that it changes are the base's again."
        )


class UpdateTally:
    """Sums up what rounding takes of updates, tensor by tensor."""

    def __init__(self) -> None:
        self._dtype = ""
        self._lost = self._whole = 0.0
        self._unchanged = self._changed = 0

    @torch.no_grad()
    def add(self, base: Tensor, update: Tensor, merged: Tensor) -> None:
        """One weight: `merged` is base + update as it is written. `update` is float32."""
        kept = merged.float() - base.float()
        self._dtype = str(merged.dtype).removeprefix("torch.")
        self._lost += float((update - kept).double().square().sum())
        self._whole += float(update.double().square().sum())
        changes = update != 0
        self._changed += int(changes.sum())
        self._unchanged += int((changes & (kept == 0)).sum())

    def result(self) -> LostUpdate | None:
        """The shares; None where no update was added, or none changes anything."""
        if not self._changed:
            return None
        return LostUpdate(self._dtype, (self._lost / self._whole) ** 0.5, self._unchanged / self._changed)


PEFT_PREFIX = "base_model.model."
"""What peft's files put before the names of a model's weights."""


def peft_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an adapter by the names of peft's files."""
    return {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of one of peft's files by the names of the model."""
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class AdapterConfig:
    """What the tensors of a LoRA adapter do not say."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    def peft(self) -> dict[str, object]:
        """What peft writes as adapter_config.json."""
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.target_modules),
            "bias": "none",
        }


@dataclass(frozen=True, eq=False)
class WeightBucket:
    """Some named tensors of one push."""

    policy_version: int
    tensors: Mapping[str, Tensor]
    specs: tuple[WeightSpec, ...]
    """Specs of the tensors that travel whole."""
    kept: tuple[WeightSpec, ...] = ()
    """Specs of tensors that the receiver makes of those that it has from an earlier push: as they are, or, where
    `tensors` has a delta of that name (`unirl.types.deltas`), with the elements that changed."""
    base_version: int | None = None
    """Version of that push, the last one to the receiver; None in a push that brings all."""
    file: str | None = None
    """Path of a safetensors file (`unirl.types.bucket_files`) with these tensors, good until the next push begins."""
    found: Mapping[str, str] = field(default_factory=dict)
    """Checksums of tensors that were computed when they arrived."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def deltas(self) -> dict[str, Tensor]:
        """The tensors that say which elements of others changed, by the names of those."""
        return {spec.name: self.tensors[spec.name] for spec in self.kept if spec.name in self.tensors}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """All that the bucket says, of these tensors."""
        return replace(self, tensors=tensors)

    def verify(self) -> None:
        """Raise WeightSyncError unless every tensor that travels whole is the one that was described."""
        whole = {spec.name for spec in self.specs}
        if not whole <= set(self.tensors) <= whole | {spec.name for spec in self.kept}:
            raise WeightSyncError(f"bucket holds {sorted(self.tensors)} but describes {[s.name for s in self.specs]}")
        unknown = [spec for spec in self.specs if spec.name not in self.found]
        sums = checksums_as(unknown, (self.tensors[spec.name] for spec in unknown))
        found = {**self.found, **{spec.name: checksum for spec, checksum in zip(unknown, sums, strict=True)}}
        for spec in self.specs:
            arrived = spec.of(self.tensors[spec.name], found[spec.name])
            if arrived != spec:
                raise WeightSyncError(f"weights arrived changed: expected {spec}, found {arrived}")


ValueT = TypeVar("ValueT")


def qualified(components: Mapping[str, Mapping[str, ValueT]]) -> dict[str, ValueT]:
    """The names that a push uses: those of the checkpoint for one component, "component/name" where there are several.

    components: component -> name -> value.
    """
    return {
        qualified_name(component, name, components): value
        for component, values in components.items()
        for name, value in values.items()
    }


def qualified_name(component: str, name: str, components: Collection[str]) -> str:
    """The name of a tensor in a push of these components, see `qualified`."""
    return name if len(components) == 1 else f"{component}/{name}"


def diff_specs(sent: Iterable[WeightSpec], expected: Iterable[WeightSpec]) -> list[str]:
    """How names, shapes and dtypes that were sent differ from the expected ones, a line each; empty where they agree.

    Checksums are left alone, and an empty dtype on the expected side takes any.
    """
    found, wanted = {spec.name: spec for spec in sent}, {spec.name: spec for spec in expected}
    lines = [f"missing: {name} {list(wanted[name].shape)}" for name in sorted(set(wanted) - set(found))]
    lines += [f"unknown: {name} {list(found[name].shape)}" for name in sorted(set(found) - set(wanted))]
    for name in sorted(set(found) & set(wanted)):
        own, other = found[name], wanted[name]
        if own.shape != other.shape:
            lines.append(f"shape: {name} is {list(own.shape)}, expected {list(other.shape)}")
        if other.dtype and own.dtype != other.dtype:
            lines.append(f"dtype: {name} is {own.dtype}, expected {other.dtype}")
    return lines


def weight_buckets(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    policy_version: int,
    max_bytes: int,
    base_version: int | None = None,
    changes: Callable[[WeightSpec, Tensor], Tensor | None] | None = None,
) -> Iterator[WeightBucket]:
    """Cut named tensors into buckets of at most `max_bytes` (a larger tensor gets its own bucket).

    base_version: see `WeightBucket`. changes: called with each tensor in turn; gives what must travel of it: the tensor
    itself, a delta, or None where the receiver has it. None sends all.
    Raises WeightSyncError if a name comes twice.
    """
    if max_bytes < 1:
        raise WeightSyncError(f"max_bytes = {max_bytes} must be at least 1")
    current: dict[str, Tensor] = {}
    specs: list[WeightSpec] = []
    kept: list[WeightSpec] = []
    size = 0
    for spec, tensor in _described(tensors, min(max_bytes, _SUMMED_TOGETHER)):
        travelling = tensor if changes is None else changes(spec, tensor)
        if travelling is None:
            kept.append(spec)
            continue
        if current and size + travelling.nbytes > max_bytes:
            yield WeightBucket(policy_version, current, tuple(specs), tuple(kept), base_version)
            current, specs, kept, size = {}, [], [], 0
        current[spec.name] = travelling
        (specs if travelling is tensor else kept).append(spec)
        size += travelling.nbytes
    if current or kept:
        yield WeightBucket(policy_version, current, tuple(specs), tuple(kept), base_version)


_SUMMED_TOGETHER = 512 << 20
"""Bytes of tensors on a device whose checksums are computed and copied to the host together."""


def _described(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[tuple[WeightSpec, Tensor]]:
    """Each tensor with its spec: on the host one by one, hashed while they are in the cache; on a device those of at
    most `max_bytes` together. Raises as `weight_buckets`."""
    seen: set[str] = set()
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if name in seen:
            raise WeightSyncError(f"weight {name} was sent twice")
        seen.add(name)
        is_on_host = sum_kind(tensor.device) == "xxh3_128"
        if group and (is_on_host or size + tensor.nbytes > max_bytes):
            yield from zip(weight_specs(group), group.values(), strict=True)
            group, size = {}, 0
        if is_on_host:
            yield weight_spec(name, tensor), tensor
            continue
        group[name] = tensor
        size += tensor.nbytes
    yield from zip(weight_specs(group), group.values(), strict=True)
