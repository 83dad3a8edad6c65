"""What blocks save leaves for the host and comes back: the same bits of gradients, and few tensors in between."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unirl.train import host_memory
from unirl.train.backend.activation_offload import offload_activations
from unirl.train.backend.recompute import selective
from unirl.train.backend.wrap import checkpoint_activations

WIDTH, TOKENS = 64, 96


class Block(nn.Module):
    """Attention whose query, key and value are views of one tensor, and a scale that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        """x, scale: [B, N, width]"""
        query, key, value = self.qkv(self.norm(x) * scale).chunk(3, -1)
        return x + self.out(F.gelu(F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]))


class Model(nn.Module):
    """Five blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width]"""
        scale = x.sigmoid()
        for block in self.blocks:
            x = block(x, scale=scale)
        return x


def gradients(model: Model, *, num_forwards: int = 1, num_backwards: int = 1) -> list[Tensor]:
    inputs = torch.randn(num_forwards, 4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs.requires_grad_()
    loss = torch.stack([model(x).square().mean() for x in inputs]).sum()
    for number in range(num_backwards):
        loss.backward(retain_graph=number + 1 < num_backwards)
    return [each.grad for each in (inputs, *model.parameters()) if each.grad is not None]


@pytest.mark.parametrize("how", ["kept", "recomputed", "selective"])
@pytest.mark.parametrize("times", [{}, {"num_forwards": 3}, {"num_backwards": 2}])
def test_gradients_keep_their_bits(how: str, times: dict[str, Any]) -> None:
    if how == "selective" and "num_backwards" in times:
        pytest.skip("torch keeps the results for one backward")
    model = Model()
    expected = gradients(copy.deepcopy(model), **times)
    if how != "kept":
        checkpoint_activations(list(model.blocks), selective() if how == "selective" else None)
    offload_activations(list(model.blocks), torch.device("cpu"))
    found = gradients(model, **times)
    assert len(found) == len(expected) == 1 + len(list(model.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_a_storage_is_copied_once_and_nothing_is_left() -> None:
    model, made = Model(), list[Tensor]()
    offload_activations(list(model.blocks), torch.device("cpu"))
    own = host_memory.host_memory
    with patch.object(host_memory, "host_memory", lambda like: made.append(own(like)) or made[-1]):
        loss = model(torch.randn(4, TOKENS, WIDTH)).square().mean()
    one = 4 * TOKENS * WIDTH
    # The shared scale once, and of each block what it was given, what was scaled, query, key and value together,
    # attention and its activation. Statistics are too small.
    assert sum(each.numel() for each in made) == one + 5 * (1 + 1 + 3 + 1 + 1) * one
    kept = [weakref.ref(each) for each in made]
    del made[:]
    loss.backward()
    del loss
    gc.collect()
    assert not any(each() is not None for each in kept)


def test_without_gradient_nothing_moves() -> None:
    model = Model()
    offload_activations(list(model.blocks), torch.device("cpu"))
    with torch.no_grad(), patch.object(host_memory, "host_memory", side_effect=AssertionError):
        model(torch.randn(4, TOKENS, WIDTH))
