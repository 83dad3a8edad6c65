"""The weights of a policy as the world outside knows them: whole, in host memory, under the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from unirl.train.backend.policies import CURRENT_POLICY, NamedPolicies
from unirl.train.backend.state import Progress
from unirl.train.backend.ties import ties_of
from unirl.train.lora import is_adapted, lora_factor_names, plain_base_name, plain_lora_name
from unirl.types.adapters import merged_weight
from unirl.types.errors import ConfigError, ContractError
from unirl.types.weights import (
    AdapterConfig,
    PublishedParts,
    UpdateTally,
    WeightShard,
    WeightsPlace,
    in_published_parts,
    qualified,
    qualified_name,
)


class PolicyWeights:
    """Reads policies tensor by tensor, for an engine or for a file.

    Implements unirl.types.protocols.training.WeightSource.

    modules: by component. adapter: of LoRA, None for full fine-tuning. before_reading: called before frozen weights are
    read (sharding drops stale gathered copies). parts: of stacks, which engines know by their parts (StacksWeights).
    kept: by "component.name", what modules compute with in another dtype than it is kept in.
    is_quantised: frozen weights are codes, so that adapters alone can be read; ConfigError for all else.
    Every rank calls every method: sharded tensors are gathered.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        policies: NamedPolicies,
        progress: Progress,
        adapter: AdapterConfig | None,
        before_reading: Callable[[], None],
        parts: Mapping[str, PublishedParts] | None = None,
        *,
        kept: Mapping[str, Tensor] | None = None,
        is_quantised: bool = False,
    ) -> None:
        self._kept = {} if kept is None else kept
        self._is_quantised = is_quantised
        self._parts = {} if parts is None else parts
        self._modules = modules
        self._policies = policies
        self._progress = progress
        self._adapter = adapter
        self._before_reading = before_reading

    # For an engine ----------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Grows with every change of the trained weights."""
        return self._progress.policy_version

    @property
    def components(self) -> tuple[str, ...]:
        """What trains, by the names of the bundle."""
        return tuple(self._modules)

    def weight_shapes(self, component: str | None = None) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of `weights`, by its name in the model's checkpoint, without moving one."""
        self._require_whole_weights()
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for name in self._chosen(component):
            names = ((plain_base_name(key), tensor) for key, tensor in self._tensors(name).items())
            shapes[name] = {
                published: _shape_of(tensor, where)
                for plain, tensor in names
                if plain is not None
                for published, where in self._published(name, plain)
            }
        return qualified(shapes)

    def weights(
        self, policy: str | None = None, component: str | None = None, *, where: WeightsPlace = "host"
    ) -> Iterator[tuple[str, Tensor]]:
        """A policy tensor by tensor, adapters merged. Every rank goes through all.

        where: they are, see WeightsPlace.
        Raises ContractError for an unknown policy or component.
        """
        self._require_whole_weights()
        chosen = self._chosen(component)
        values = self._policies.values(CURRENT_POLICY if policy is None else policy)
        self._before_reading()
        for name in chosen:
            for plain, tensor in self._merged(name, self._tensors(name), values, where=where):
                for published, part in in_published_parts({plain: tensor}, self._parts, f"{name}.").items():
                    yield qualified_name(name, published, chosen), part

    def shard_rows(self) -> dict[str, tuple[tuple[int, ...], torch.dtype, int, int]]:
        """See WeightSource. Shape and dtype are those of the tensor, of which this rank has rows [start, stop)."""
        self._require_whole_weights()
        found: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype, int, int]]] = {}
        for component in self._modules:
            names = ((plain_base_name(key), tensor) for key, tensor in self._tensors(component).items())
            found[component] = {
                published: (_shape_of(tensor, where), tensor.dtype, *_rows_of_part(tensor, where))
                for plain, tensor in names
                if plain is not None
                for published, where in self._published(component, plain)
            }
        return qualified(found)

    def shards(self, policy: str | None = None) -> Iterator[WeightShard]:
        """See WeightSource. Raises ContractError for an unknown policy."""
        self._require_whole_weights()
        values = self._policies.values(CURRENT_POLICY if policy is None else policy)
        self._before_reading()
        for component in self._modules:
            own = {key: values.get(f"{component}.{key}", tensor) for key, tensor in self._tensors(component).items()}
            for key, tensor in own.items():
                plain = plain_base_name(key)
                if plain is None:
                    continue
                (start, stop), rows = _rows_of(tensor), _own_rows(tensor)
                if self._adapter is not None and is_adapted(key):
                    a, b = (_whole(own[factor]) for factor in lora_factor_names(key))
                    rows = merged_weight(
                        rows.to("cpu"), a, b, rank=self._adapter.rank, alpha=self._adapter.alpha, rows=(start, stop)
                    )
                for published, where in self._published(component, plain):
                    shape, first = _shape_of(tensor, where), start
                    part = rows
                    if where is not None:
                        first, end = _rows_of_part(tensor, where)
                        part = rows[where[0] - start, where[1]] if end > first else rows.new_empty(0, *shape[1:])
                    yield WeightShard(qualified_name(component, published, self._modules), shape, first, part)

    def adapter_weights(self, policy: str | None = None, component: str | None = None) -> dict[str, Tensor]:
        """A policy's LoRA factors as peft names them. Raises ConfigError for full fine-tuning."""
        self.adapter_config()
        state = self.adapter_state(CURRENT_POLICY if policy is None else policy)
        return qualified({name: state[name] for name in self._chosen(component)})

    def adapter_config(self) -> AdapterConfig:
        """Rank, alpha and targets of the adapters. Raises ConfigError for full fine-tuning."""
        if self._adapter is None:
            raise ConfigError("there is no adapter to push: set backend.lora, or push full weights")
        return self._adapter

    def _require_whole_weights(self) -> None:
        if self._is_quantised:
            raise ConfigError(
                "lora.base = 'nf4' keeps frozen weights as codes, into which no adapter is merged. Push or export the "
                "adapters alone, and merge them into the published weights."
            )

    def _tensors(self, component: str) -> dict[str, Tensor]:
        """The state of a component in the dtypes that it is kept in, tied parameters once."""
        ties = ties_of(self._modules[component])
        return {name: each for name, each in self._every_name(component).items() if name not in ties}

    def _every_name(self, component: str) -> dict[str, Tensor]:
        module = self._modules[component]
        ties = ties_of(module)
        return {
            name: self._kept.get(f"{component}.{ties.get(name, name)}", tensor).detach()
            for name, tensor in module.state_dict().items()
        }

    def _published(self, component: str, plain: str) -> Iterable[tuple[str, tuple[int, slice] | None]]:
        """Published names of a tensor, and where each lies in it: None of one that is published as it is."""
        parts = self._parts.get(f"{component}.{plain}")
        return [(plain, None)] if parts is None else parts.items()

    def _chosen(self, component: str | None) -> Mapping[str, nn.Module]:
        if component is None:
            return self._modules
        if component not in self._modules:
            raise ContractError(f"there is no component {component!r} that trains; there are {sorted(self._modules)}")
        return {component: self._modules[component]}

    # For a file, which takes all --------------------------------------------------------------------------------

    def adapter_state(self, policy: str) -> dict[str, dict[str, Tensor]]:
        """Component -> LoRA factors of a policy as peft names them. Raises ContractError for an unknown policy."""
        state: dict[str, dict[str, Tensor]] = {component: {} for component in self._modules}
        for name, tensor in self._policies.values(policy).items():
            component, _, rest = name.partition(".")
            state[component][plain_lora_name(rest)] = _whole(tensor)
        return state

    def merged_state(
        self, policy: str, *, in_float32: bool = False, tally: UpdateTally | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """Component -> all its weights under a policy, adapters merged; in their own dtype, or all in float32.

        tally: is told of every weight that an adapter was merged into. Raises ContractError for an unknown policy.
        """
        self._require_whole_weights()
        values = self._policies.values(policy)
        self._before_reading()
        dtype = torch.float32 if in_float32 else None
        return {
            name: dict(self._merged(name, self._every_name(name), values, dtype=dtype, tally=tally))
            for name in self._modules
        }

    def _merged(
        self,
        component: str,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        *,
        dtype: torch.dtype | None = None,
        tally: UpdateTally | None = None,
        where: WeightsPlace = "host",
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under the names that the model has without adapters, one after the other.

        dtype: of what is no integer; None keeps each tensor's own. where: see `weights`.
        """
        tensors = {name: values.get(f"{component}.{name}", tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            plain = plain_base_name(name)
            if plain is None:
                continue
            is_merged = self._adapter is not None and is_adapted(name)
            stays = where == "device" or (where == "kept" and not isinstance(tensor, DTensor) and not is_merged)
            whole = _whole(tensor, on_host=not stays)
            if self._adapter is not None and is_adapted(name):
                a, b = (_whole(tensors[factor], on_host=not stays) for factor in lora_factor_names(name))
                adapter = self._adapter
                whole = merged_weight(whole, a, b, rank=adapter.rank, alpha=adapter.alpha, dtype=dtype, tally=tally)
            yield plain, whole if dtype is None or not whole.is_floating_point() else whole.to(dtype)


@torch.no_grad()
def _whole(tensor: Tensor, *, on_host: bool = True) -> Tensor:
    """The unsharded tensor in host memory, or where its shards lie. Every rank calls it."""
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return whole.to("cpu") if on_host else whole


def _shape_of(tensor: Tensor, where: tuple[int, slice] | None) -> tuple[int, ...]:
    """Shape of a part of a tensor, or of all of it."""
    if where is None:
        return tuple(tensor.shape)
    return (len(range(*where[1].indices(tensor.shape[1]))), *tensor.shape[2:])


def _rows_of_part(tensor: Tensor, where: tuple[int, slice] | None) -> tuple[int, int]:
    """First row and end of what this rank has of a part: all of it or nothing, where the stack is cut at all."""
    start, stop = _rows_of(tensor)
    if where is None:
        return start, stop
    return 0, _shape_of(tensor, where)[0] if start <= where[0] < stop else 0


def _row_axis(tensor: DTensor) -> int | None:
    """The axis of the mesh over which the rows of a tensor are cut; None where it is cut otherwise, or not at all."""
    cut = _cut_axes(tensor)
    is_of_rows = len(cut) == 1 and type(tensor.placements[cut[0]]) is Shard and tensor.placements[cut[0]] == Shard(0)
    return cut[0] if is_of_rows else None


def _cut_axes(tensor: DTensor) -> list[int]:
    """The axes of the mesh along which ranks hold different parts of a tensor."""
    return [
        axis
        for axis, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate) and tensor.device_mesh.size(axis) > 1
    ]


def _rows_of(tensor: Tensor) -> tuple[int, int]:
    """First row and end of what `_own_rows` gives; FSDP cuts as torch.chunk does."""
    num = tensor.shape[0] if tensor.dim() else 1
    axis = _row_axis(tensor) if isinstance(tensor, DTensor) else None
    if axis is None or not isinstance(tensor, DTensor):
        return 0, num
    chunk = -(-num // tensor.device_mesh.size(axis))
    start = min(num, tensor.device_mesh.get_local_rank(axis) * chunk)
    return start, min(num, start + chunk)


@torch.no_grad()
def _own_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor, where they lie; all of one that is not cut by rows, which every rank gathers."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    is_gathered = bool(_cut_axes(tensor)) and _row_axis(tensor) is None
    return (tensor.full_tensor() if is_gathered else tensor.to_local()).detach()
