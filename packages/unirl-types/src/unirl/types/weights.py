"""Weights on their way from the trainer to an engine: buckets of named tensors with what the receiver must check."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self, TypeVar

import torch
import xxhash
from torch import Tensor

from unirl.types.errors import WeightSyncError


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


def tensor_checksum(tensor: Tensor, stops: Sequence[int] = ()) -> str:
    """XXH3 (128 bits, hexadecimal) of the tensor's bytes (row-major), the same on every device; in pieces that end at
    the rows `stops`, of their checksums.

    As fast as memory is read. It finds what transports and bugs do to weights; it is no proof against a forger.
    """
    if stops:
        return joined_checksum([tensor_checksum(tensor[start:stop]) for start, stop in pairwise((0, *stops))])
    data = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy())


def joined_checksum(pieces: Sequence[str]) -> str:
    """The checksum of a tensor by those of its pieces."""
    return xxhash.xxh3_128_hexdigest("".join(pieces).encode())


def weight_spec(name: str, tensor: Tensor, stops: tuple[int, ...] = ()) -> WeightSpec:
    """What a receiver must find for this tensor. stops: see `WeightSpec`."""
    return WeightSpec(name, tuple(tensor.shape), str(tensor.dtype), tensor_checksum(tensor, stops), stops)


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

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """All that the bucket says, of these tensors."""
        return replace(self, tensors=tensors)

    def verify(self) -> None:
        """Raise WeightSyncError unless every tensor that travels whole is the one that was described."""
        whole = {spec.name for spec in self.specs}
        if not whole <= set(self.tensors) <= whole | {spec.name for spec in self.kept}:
            raise WeightSyncError(f"bucket holds {sorted(self.tensors)} but describes {[s.name for s in self.specs]}")
        for spec in self.specs:
            tensor = self.tensors[spec.name]
            checksum = self.found.get(spec.name) or tensor_checksum(tensor, spec.stops)
            found = WeightSpec(spec.name, tuple(tensor.shape), str(tensor.dtype), checksum, spec.stops)
            if found != spec:
                raise WeightSyncError(f"weights arrived changed: expected {spec}, found {found}")


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
    """Cut named tensors into buckets of at most `max_bytes` (a larger tensor gets its own).

    base_version: see `WeightBucket`. changes: called with each tensor in turn; gives what must travel of it: the tensor
    itself, a delta, or None where the receiver has it. None sends all.
    Raises WeightSyncError if a name comes twice.
    """
    if max_bytes < 1:
        raise WeightSyncError(f"max_bytes = {max_bytes} must be at least 1")
    current: dict[str, Tensor] = {}
    specs: list[WeightSpec] = []
    kept: list[WeightSpec] = []
    seen: set[str] = set()
    size = 0
    for name, tensor in tensors:
        if name in seen:
            raise WeightSyncError(f"weight {name} was sent twice")
        seen.add(name)
        spec = weight_spec(name, tensor)
        travelling = tensor if changes is None else changes(spec, tensor)
        if travelling is None:
            kept.append(spec)
            continue
        if current and size + travelling.nbytes > max_bytes:
            yield WeightBucket(policy_version, current, tuple(specs), tuple(kept), base_version)
            current, specs, kept, size = {}, [], [], 0
        current[name] = travelling
        (specs if travelling is tensor else kept).append(spec)
        size += travelling.nbytes
    if current or kept:
        yield WeightBucket(policy_version, current, tuple(specs), tuple(kept), base_version)
