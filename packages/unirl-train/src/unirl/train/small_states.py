"""AdamW whose moments take a quarter of the memory, or half: 8-bit codes, or bfloat16 that is rounded at random.

Every state is a plain tensor with the sharding of its parameter, and no value depends on how many ranks share it, so
that a checkpoint resumes on any number of them with the same next step.

Legend: N elements of a part of a parameter, K of them to a block.
Sources: 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861); stochastic rounding, Gupta et al. 2015
(arXiv 1502.02551).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from unirl.train.block_codes import dequantised, quantised
from unirl.train.optimizer_base import SteppedOptimizer
from unirl.train.shards import local_part

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 32
"""Elements of a row that share a scale. A parameter whose rows divide into no such blocks keeps its moments whole."""
SMALLEST_SIZE = 4096
"""A parameter with fewer elements keeps its moments whole, as in the paper's code."""
AT_ONCE = 1 << 22
"""Elements that are computed with in float32 at a time."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def dynamic_values(*, is_signed: bool) -> Tensor:
    """float32 [256], ascending: the values of an 8-bit code, in [-1, 1] or [0, 1] (dynamic tree quantisation)."""
    found = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1.0, 2**power * (1 if is_signed else 2) + 1)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (power - 6)).tolist()
        found += middles
        found += [-value for value in middles] if is_signed else []
    return torch.tensor(sorted(found))


def noise(first: int, num: int, seed: int, device: torch.device) -> Tensor:
    """int32 [num], 16 random bits for each of the elements from `first` on, which depend on the element's place and the
    seed alone: the same on every device, and on any number of ranks.

    A mixer of 32 bits with little bias (github.com/skeeto/hash-prospector).
    """
    x = torch.arange(num, dtype=torch.int32, device=device)
    x += _signed(first + seed * 0x9E3779B1)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x ^= (x >> shift) & ((1 << (32 - shift)) - 1)
        x *= _signed(factor)
    return x & 0xFFFF


def rounded_at_random(values_N: Tensor, bits_N: Tensor) -> Tensor:
    """bfloat16 [N]: one of the two neighbours of each float32, the upper with the probability that makes the mean
    exact. bits: int32 [N] in [0, 65536). Not for values within one step of float32's largest."""
    return ((values_N.view(torch.int32) + bits_N) & -65536).view(torch.float32).to(torch.bfloat16)


def _signed(number: int) -> int:
    """The same 32 bits as a signed integer."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


class SmallStateAdamW(SteppedOptimizer):
    """AdamW with decoupled weight decay, computed in float32.

    states: "8bit", codes of one byte with a float32 scale per block of a row (parameters of too few elements, or whose
    rows do not divide, keep float32); "bf16", rounded at random. Parameters in bfloat16 are rounded at random too, so
    that small updates add up. keep: gives what is kept of each new state, in the memory where it is to rest.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        states: Literal["8bit", "bf16"],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        keep: Callable[[Tensor], Tensor],
    ) -> None:
        # `fused` as torch's AdamW has it: step counts are numbers of the host.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": False}
        super().__init__(list(parameters), defaults)
        self._states = states
        self._tables: dict[torch.device, dict[str, Tensor]] = {}
        for parameter in parameters:
            zeros = self._zeros(parameter)
            self.state[parameter] = {name: zeros[name] if name == "step" else keep(zeros[name]) for name in zeros}
        self._numbers = {parameter: number for number, parameter in enumerate(parameters, 1)}
        """No two parameters are rounded alike, and each as ever where some are stepped at a time."""

    def _zeros(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), dtype=torch.float32)}
        block = block_of(parameter) if self._states == "8bit" else None
        for name in MOMENTS:
            if self._states == "bf16":
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)
            elif block is None:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            else:
                # A scale of zero makes any code a zero.
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
                state[f"{name}_scale"] = _zeros_by_block(parameter, block)
        return state

    def _step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        # Any: a group's options.
        state, number = self.state[parameter], self._numbers[parameter]
        step = int(state["step"])
        order = _in_order(parameter)
        local = {name: local_part(value).permute(order).view(-1) for name, value in state.items() if name != "step"}
        flat = local_part(parameter.detach()).permute(order).view(-1)
        grad = local_part(gradient).permute(order).reshape(-1)
        block = block_of(parameter) if self._states == "8bit" else None
        block = 1 if block is None else block
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for part, first in _parts(parameter, AT_ONCE // block * block):
            g = grad[part].float()
            moments = {name: self._read(local, name, part, block) for name in MOMENTS}
            moments["exp_avg"].lerp_(g, 1 - beta1)
            moments["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            seed = 3 * (number + 65537 * step)
            for place, name in enumerate(MOMENTS):
                self._write(local, name, part, block, moments[name], first, seed + place)
            denominator = (moments["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
            value = flat[part].float().mul_(1 - lr * group["weight_decay"])
            value.addcdiv_(moments["exp_avg"], denominator, value=-lr / (1 - beta1**step))
            _store(flat[part], value, first, seed + 2)

    def _read(self, local: dict[str, Tensor], name: str, part: slice, block: int) -> Tensor:
        """A moment in float32, a new tensor."""
        held = local[name][part]
        if held.dtype != torch.uint8:
            return held.to(torch.float32, copy=True)
        scale = local[f"{name}_scale"][part.start // block : part.stop // block]
        return dequantised(held, scale, self._table(name, held.device), block)

    def _write(
        self, local: dict[str, Tensor], name: str, part: slice, block: int, values: Tensor, first: int, seed: int
    ) -> None:
        held = local[name][part]
        if held.dtype != torch.uint8:
            _store(held, values, first, seed)
            return
        codes, scale = quantised(values, self._table(name, held.device), block)
        held.copy_(codes)
        local[f"{name}_scale"][part.start // block : part.stop // block].copy_(scale)

    def _table(self, name: str, device: torch.device) -> Tensor:
        if device not in self._tables:
            self._tables[device] = {each: dynamic_values(is_signed=each == "exp_avg").to(device) for each in MOMENTS}
        return self._tables[device][name]


def block_of(parameter: Tensor) -> int | None:
    """Elements of a row that share a scale; None where the moments stay whole, as where rows themselves are cut."""
    width = parameter.shape[-1] if parameter.ndim > 1 else 1
    if parameter.numel() < SMALLEST_SIZE:
        return None
    if isinstance(parameter, DTensor) and any(
        isinstance(each, Shard) and each.dim % parameter.ndim == parameter.ndim - 1 for each in parameter.placements
    ):
        return None
    return next((size for size in range(LARGEST_BLOCK, SMALLEST_BLOCK - 1, -1) if width % size == 0), None)


def _zeros_by_block(parameter: nn.Parameter, block: int) -> Tensor:
    """float32 zeros [..., width / K], sharded as the parameter."""
    local = local_part(parameter)
    shape = torch.Size((*local.shape[:-1], local.shape[-1] // block))
    made = torch.zeros(shape, dtype=torch.float32, device=local.device)
    if not isinstance(parameter, DTensor):
        return made
    whole = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // block))
    stride = torch.empty(whole, device="meta").stride()
    sharded = DTensor.from_local(
        made, parameter.device_mesh, parameter.placements, run_check=False, shape=whole, stride=stride
    )
    return sharded.to(parameter.device)  # with fsdp.cpu_offload the host, which is not the device of the mesh


def _in_order(parameter: Tensor) -> list[int]:
    """Dimensions from the one whose steps in memory are largest: convolutions may have their channels last."""
    stride = local_part(parameter).stride()
    return sorted(range(parameter.ndim), key=lambda dim: -stride[dim])


def _store(held: Tensor, values: Tensor, first: int, seed: int) -> None:
    """Write float32 values, to bfloat16 by rounding at random."""
    if held.dtype == torch.bfloat16:
        values = rounded_at_random(values, noise(first, len(values), seed, values.device))
    held.copy_(values)


def _parts(parameter: nn.Parameter, most: int) -> Iterator[tuple[slice, int]]:
    """Slices of this rank's elements, each with the place of its first in the whole parameter (of one that is cut
    along its first dimension, as all are but spread experts)."""
    num, start = local_part(parameter).numel(), 0
    if isinstance(parameter, DTensor):
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        start = sum(at * math.prod(parameter.shape[dim + 1 :]) for dim, at in enumerate(offset))
    for begin in range(0, num, most):
        yield slice(begin, min(begin + most, num)), start + begin
