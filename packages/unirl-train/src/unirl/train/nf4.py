"""Frozen linear layers whose weights are kept in 4 bits (NF4), for LoRA on top (QLoRA, arXiv 2305.14314).

Each block of 64 elements of a row has a float32 scale, its largest magnitude, and each element a code of 4 bits, the
nearest of 16 quantiles of a normal distribution: 0.5625 bytes per element. The second quantisation of the paper, of the
scales, is left out. Codes are buffers: every rank has all of them, and nothing gathers them.

Legend: O outputs, I inputs, K elements of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unirl.train.block_codes import quantised
from unirl.types.errors import ConfigError

BLOCK = 64
OFFSET = 0.9677083
"""Probability of the outermost quantiles before they are scaled to one (appendix E of the paper, and its code)."""


def normal_values() -> Tensor:
    """float32 [16], ascending from -1 to 1, with an exact zero: eight quantiles above it and seven below."""
    normal = torch.distributions.Normal(0.0, 1.0)
    above = normal.icdf(torch.linspace(OFFSET, 0.5, 9, dtype=torch.float64)[:-1])
    below = -normal.icdf(torch.linspace(OFFSET, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    return (values / values.abs().max()).float()


class NF4Linear(nn.Module):
    """A frozen linear layer with 4-bit weights, which computes with them in the dtype of its input, or of autocast.

    Gradients go to the input alone.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        values = normal_values().to(layer.weight.device)
        codes, scale = quantised(layer.weight.detach().float().reshape(-1), values, BLOCK)
        high, low = codes.view(-1, 2).unbind(1)
        pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)
        self.codes: Tensor
        self.scale: Tensor
        self.pairs: Tensor
        self.register_buffer("codes", (high << 4) | low, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("pairs", pairs, persistent=False)
        """float32 [256, 2]: both values of a byte."""

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """[O, I], as it is computed with."""
        values = self.pairs.index_select(0, self.codes.int()).view(-1, BLOCK)
        return values.mul_(self.scale[:, None]).to(dtype).view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _Product.apply(x.to(dtype), self)


class _Product(torch.autograd.Function):
    """The layer's weight is made again in the backward, and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:  # Any: torch's context
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.weight_in(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.weight_in(grad.dtype), None


def quantise_frozen(blocks: Mapping[str, Sequence[nn.Module]]) -> None:
    """Replace the linear layers inside blocks whose weights are frozen, in place, where their inputs divide into blocks
    of 64. blocks: by component. Raises ConfigError if there is none, or if weights have no values yet."""
    for component, found in blocks.items():
        places = [
            (parent, name, layer)
            for block in found
            for parent in block.modules()
            for name, layer in parent.named_children()
            if type(layer) is nn.Linear and not layer.weight.requires_grad and layer.in_features % BLOCK == 0
        ]
        if not places:
            raise ConfigError(
                f"lora.base = 'nf4': the blocks of {component} have no linear layer whose inputs divide by {BLOCK}. "
                "Set lora.base: null."
            )
        for parent, name, layer in places:
            if layer.weight.is_meta:
                raise ConfigError(
                    f"lora.base = 'nf4': the weights of {component} have no values yet. Set bundle.defers_weights: "
                    "false."
                )
            setattr(parent, name, NF4Linear(layer))
