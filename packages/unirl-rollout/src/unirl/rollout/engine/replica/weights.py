"""A copy of the trained modules: receives whole pushes or LoRA adapters, and can move to host memory while unused.

Legend: I inputs, O outputs of a linear layer, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from unirl.rollout.engine.push import PushReceiver, refuse
from unirl.types.adapters import FACTOR_A, FACTOR_B
from unirl.types.deltas import on_host, put_delta
from unirl.types.devices import copy_together, empty_cache, has_values, is_accelerator
from unirl.types.errors import ContractError
from unirl.types.weights import (
    AdapterConfig,
    PublishedParts,
    WeightBucket,
    WeightReceipt,
    WeightSpec,
    in_published_parts,
    qualified,
    rounded,
)


class _Adapted(NamedTuple):
    """A linear layer with an adapter."""

    hook: RemovableHandle
    factors: dict[str, Tensor]
    """A [r, I] and B [O, r] by name suffix."""


class ReplicaWeights:
    """Trainable modules of an engine's own bundle, which receive pushes.

    modules: by component, changed in place. dtype: of the parameters and of pushed tensors. policy_version: of the
    initial weights. stacks: of the bundle, which are pushed by their parts (StacksWeights). Methods: see
    `unirl.types.protocols.engines.WeightReceiver`.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        dtype: torch.dtype,
        device: torch.device,
        policy_version: int,
        stacks: Mapping[str, PublishedParts] | None = None,
    ) -> None:
        self._modules = dict(modules)
        self._stacks = {} if stacks is None else stacks
        self._device = device
        self._dtype = dtype
        for module in self._modules.values():
            module.to(device).requires_grad_(False)
            for parameter in module.parameters():
                parameter.data = parameter.data.to(dtype)
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors().items()}
        self.pushes = PushReceiver(shapes, str(dtype), policy_version)
        self._received: dict[str, Tensor] = {}
        self._deltas: dict[str, Tensor] = {}
        """Changed elements of other tensors."""
        self._adapted: list[_Adapted] = []
        self._is_asleep = False

    @property
    def device(self) -> torch.device:
        """Device of the modules while they are awake."""
        return self._device

    def begin(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """Announce a push of the whole model."""
        self._received, self._deltas = {}, {}
        self.pushes.announce(policy_version, specs)

    def receive(self, bucket: WeightBucket) -> None:
        """Keep the bucket's tensors, which do not change until the next push begins."""
        deltas = on_host(bucket.deltas)
        bucket = bucket.with_tensors({**bucket.tensors, **deltas})
        with self.pushes.receiving(bucket, self._pushed() if bucket.kept else {}):
            self._deltas.update(deltas)
            self._received.update({name: tensor for name, tensor in bucket.tensors.items() if name not in deltas})

    @torch.no_grad()
    def finish(self, policy_version: int, policy: str | None) -> WeightReceipt:
        """Copy the received tensors into the weights, and remove an adapter."""
        received, deltas = self._received, self._deltas
        self._received, self._deltas = {}, {}
        push = self.pushes.finish(policy_version)
        own = self._tensors()
        with self.pushes.loading(policy_version, policy):
            self._remove_adapter()
            copy_together([own[name] for name in received], list(received.values()))
            for name, delta in deltas.items():
                tensor = rounded(own[name], self._dtype)
                put_delta(tensor, delta)
                if tensor is not own[name]:
                    own[name].copy_(tensor)
            if is_accelerator(self._device) and has_values(self._device):
                torch.accelerator.synchronize(self._device)  # the sender may then write over what it sent
        return WeightReceipt(policy_version, push.num_tensors, push.num_bytes, push.num_tensors)

    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None) -> WeightReceipt:
        """Replace the LoRA adapter, which adds a term to each layer's output as in training."""
        self.pushes.check_adapter(bucket, config.rank)
        modules = qualified({name: dict(module.named_modules()) for name, module in self._modules.items()})
        layers = sorted({name.removesuffix(FACTOR_A) for name in bucket.tensors if name.endswith(FACTOR_A)})
        wrong = [f"{layer}: no linear layer" for layer in layers if not isinstance(modules[layer], nn.Linear)]
        refuse("the adapter does not fit the engine's model", wrong)
        with self.pushes.loading(bucket.policy_version, policy):
            self._remove_adapter()
            for layer in layers:
                place = modules[layer]
                factors = {
                    suffix: bucket.tensors[layer + suffix].to(_device(place), copy=True)
                    for suffix in (FACTOR_A, FACTOR_B)
                }
                scale = config.alpha / config.rank
                hook = place.register_forward_hook(partial(_with_adapter, factors=factors, scale=scale))
                self._adapted.append(_Adapted(hook, factors))
        return WeightReceipt(bucket.policy_version, len(bucket.tensors), bucket.num_bytes, len(layers))

    def sleep(self) -> None:
        """Move the weights to host memory. Pushes are still accepted."""
        self._is_asleep = True
        self._move(torch.device("cpu"))
        empty_cache(self._device)

    def wake_up(self) -> None:
        """Move the weights back."""
        self._move(self._device)
        self._is_asleep = False

    def require_awake(self) -> None:
        """Raise ContractError between `sleep` and `wake_up`."""
        if self._is_asleep:
            raise ContractError("generate while the engine sleeps: call wake_up() first")

    def _move(self, device: torch.device) -> None:
        for module in self._modules.values():
            module.to(device)
        for adapted in self._adapted:
            adapted.factors.update({suffix: factor.to(device) for suffix, factor in adapted.factors.items()})

    def _remove_adapter(self) -> None:
        for adapted in self._adapted:
            adapted.hook.remove()
        self._adapted = []

    def _pushed(self) -> dict[str, Tensor]:
        """What the last push brought; a buffer in another dtype has it without loss."""
        return {name: rounded(tensor, self._dtype) for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Tensors of a push of the whole model, by name; they share memory with the modules."""
        return qualified(
            {
                name: in_published_parts(_without_ties(module), self._stacks, f"{name}.")
                for name, module in self._modules.items()
            }
        )


def _with_adapter(
    layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, *, factors: Mapping[str, Tensor], scale: float
) -> Tensor:
    """W x + (alpha / r) B A x in peft's order of operations, so that results are bit-identical to the trainer's."""
    low_rank = functional.linear(inputs[0].to(factors[FACTOR_A].dtype), factors[FACTOR_A])
    return (output + functional.linear(low_rank, factors[FACTOR_B]) * scale).to(output.dtype)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _without_ties(module: nn.Module) -> dict[str, Tensor]:
    """The module's state; a parameter with two names appears once, under the first."""
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    tied = every - {name for name, _ in module.named_parameters()}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}
