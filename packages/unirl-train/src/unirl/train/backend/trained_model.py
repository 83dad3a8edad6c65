"""The model that trains as this rank has it: its modules spread, sharded and filled, and its trainable parameters."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from unirl.train.backend.build import Sharding, compute_in, is_sharding, prepare_parameters, wrap
from unirl.train.backend.collectives import RankCollectives
from unirl.train.backend.expert_exchange import RowExchange
from unirl.train.backend.fill import fill, on_every_rank
from unirl.train.backend.layer_exchange import SumExchange
from unirl.train.backend.policies import NamedPolicies
from unirl.train.backend.ring import token_exchange
from unirl.train.backend.state import Progress, architecture
from unirl.train.backend.weight_source import PolicyWeights
from unirl.train.backend.wrap import reshard
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.train.lora import is_empty
from unirl.types.protocols.models import DefersWeights, ModelBundle, RoutesRows, StacksWeights
from unirl.types.roles import MeshPlace


class TrainedModel:
    """The trainable modules of a bundle, changed in place: adapters, dtypes, what ranks exchange, shards, then values.

    place: where this rank stands. sharding: how FSDP2 is applied, where there is something to shard.
    Every rank makes one; collectives inside. Raises ConfigError for options that do not fit the model.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        config: FSDPConfig,
        lora: LoraConfig | None,
        place: MeshPlace,
        sharding: Sharding,
        device: torch.device,
    ) -> None:
        self._config = config
        self._lora = lora
        self.modules = bundle.trainable_modules()
        """By component."""
        # Before adapters and dtypes of training change names and dtypes. A second backend of a bundle finds values.
        is_deferred = isinstance(bundle, DefersWeights) and any(map(is_empty, self.modules.values()))
        stored = on_every_rank(bundle.stored_weights) if is_deferred else {}
        self._parts = bundle.published_parts() if isinstance(bundle, StacksWeights) else {}
        self._adapter = prepare_parameters(bundle, self.modules, config, lora, device)
        self.collectives = RankCollectives(place, device, is_sharded=is_sharding(config))
        """What the ranks tell each other."""
        self.token_exchange = token_exchange(self.collectives, place, device)
        """How tokens are spread over ranks; None where no two ranks work on the same samples."""
        self.expert_exchange = RowExchange(self.collectives.group("ep")) if place.ep_size > 1 else None
        """How tokens reach their experts; None where each rank has all."""
        self.layer_exchange = SumExchange(self.collectives.group("tp")) if place.tp_size > 1 else None
        """How ranks add up what their parts of a layer make; None where each has whole layers."""
        self._roots, self.owns_process_group = wrap(
            bundle,
            self.modules,
            config,
            sharding,
            device,
            self.token_exchange,
            self.expert_exchange,
            self.layer_exchange,
        )
        if is_deferred:
            shards_on = torch.device("cpu") if config.cpu_offload else device
            fill(self.modules, stored, lora, shards_on=shards_on, buffers_on=device)
        if self._roots and isinstance(bundle, RoutesRows):
            bundle.follow_ranks(self.collectives.any_rank)
        self._masters = compute_in({} if self._roots else self.modules, config)
        self.parameters = {
            f"{component}.{name}": self._masters.of.get(f"{component}.{name}", parameter)
            for component, module in self.modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        """Trainable ones by "component.name"; DTensors where sharded."""

    @property
    def is_sharded(self) -> bool:
        """True if FSDP wraps the modules."""
        return bool(self._roots)

    @property
    def computes_in_float32(self) -> bool:
        """True if forwards are in float32 throughout, autocast aside."""
        is_float32 = all(
            parameter.dtype == torch.float32 for module in self.modules.values() for parameter in module.parameters()
        )
        return is_float32 and self._config.param_dtype == "fp32"

    @contextmanager
    def accumulating(self, is_last: bool) -> Generator[None]:
        """Inside, a backward sums gradients over devices only if it is the last."""
        for root in self._roots:
            root.set_requires_gradient_sync(is_last)
        try:
            yield
        finally:
            for root in self._roots:
                root.set_requires_gradient_sync(True)

    def follow_values(self) -> None:
        """Parameters have changed: what computes takes their values."""
        self._masters.follow()
        self.reshard()

    def reshard(self) -> None:
        """Drop gathered copies of sharded parameters."""
        if self._roots:
            reshard(self.modules)

    def weight_source(self, policies: NamedPolicies, progress: Progress) -> PolicyWeights:
        """Weights of the policies for engines and exports."""
        return PolicyWeights(
            self.modules,
            policies,
            progress,
            self._adapter,
            self.reshard,
            self._parts,
            kept=self._masters.of,
            is_quantised=self._lora is not None and self._lora.base is not None,
        )

    def move(self, device: torch.device) -> None:
        """Move parameters with their gradients, and buffers."""
        for module in self.modules.values():
            module.to(device)
        self._masters.move(device)

    def architecture(self, others: Mapping[str, nn.Module]) -> dict[str, list[object]]:
        """Parameter name -> [shape, dtype, whether it trains], of all parameters and those of `others`."""
        self.reshard()
        return architecture({**self.modules, **others}, self._masters.of)

    def close(self) -> None:
        """Destroy the process group where one was made for the model. Safe to call twice."""
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        self.owns_process_group = False
