"""What training computes, and at which share of the rate that the maker of the device publishes.

A rollout is counted once, operator by operator, and later ones are taken to compute as much per loss term: exact for
diffusion at one size, and but for attention for texts. Matrix products, convolutions and attention count; what
activation checkpointing computes again counts twice, since the device computes it twice.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from unirl.types.devices import device_name, has_values
from unirl.types.protocols.training import TrainBackend


@dataclass(frozen=True)
class MatrixRates:
    """Rates of matrix products in FLOP per second, dense, from the maker's data sheet."""

    half: float
    """In bfloat16 or float16."""
    single: float
    """In float32, without TF32."""


PUBLISHED = {
    "H100 PCIe": MatrixRates(756e12, 51e12),
    "H100 NVL": MatrixRates(835e12, 60e12),
    "H100": MatrixRates(989e12, 67e12),
    "H200": MatrixRates(989e12, 67e12),
    "A100": MatrixRates(312e12, 19.5e12),
    "L40S": MatrixRates(362e12, 91.6e12),
    "MI300X": MatrixRates(1307e12, 163e12),
    "Ascend910B": MatrixRates(320e12, 80e12),
}
"""By a part of the name that PyTorch has for a device; the first that fits."""


def published_rates(name: str | None) -> MatrixRates | None:
    """What the maker says of a device of this name; None if it is not known."""
    return next((rates for part, rates in PUBLISHED.items() if name is not None and part in name), None)


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """FLOPs of q k^T and attention @ v; shapes [batch, heads, length, width]."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _attention_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> int:
    return _attention_flops(query.shape, key.shape, value.shape)


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * _attention_flops(query.shape, key.shape, value.shape)


FORMULAS = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""PyTorch's own, and operators that it leaves out; scores that a backward computes again do not count."""


class FlopCounter(TorchDispatchMode):
    """Inside, `total` grows by the FLOPs of every operator of this thread and its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: arguments and results of operators
        options = kwargs or {}
        out = func(*args, **options)
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **options, out_val=out)
        return out


class TrainingRate:
    """Measures the training of one backend. Nothing is counted in a rehearsal, nor of compiled blocks, which would run
    uncompiled for it."""

    def __init__(self, backend: TrainBackend) -> None:
        rates = published_rates(device_name(backend.device))
        self._peak = None if rates is None else rates.single if backend.computes_in_float32 else rates.half
        self._counts = has_values(backend.device) and not backend.is_compiled
        self._flops_per_term: dict[Hashable, float] = {}
        self.num_terms = 0
        """Loss terms of this rank in the rollout that is measured, to add to."""

    @contextmanager
    def measured(self, kind: Hashable) -> Generator[dict[str, float]]:
        """Inside, a rollout trains that ends with its results on the host; afterwards the metrics have its rate, unless
        it was the first of its kind: that is counted, which takes time.

        kind: what trains, where that changes from rollout to rollout.
        """
        metrics: dict[str, float] = {}
        self.num_terms = 0
        if not self._counts:
            yield metrics
            return
        known = self._flops_per_term.get(kind)
        if known is None:
            with FlopCounter() as counter:
                yield metrics
            if self.num_terms:
                self._flops_per_term[kind] = counter.total / self.num_terms
            return
        started = time.perf_counter()
        yield metrics
        rate = known * self.num_terms / (time.perf_counter() - started)
        metrics["perf/train_tflops"] = rate / 1e12
        if self._peak is not None:
            metrics["perf/train_mfu"] = rate / self._peak
