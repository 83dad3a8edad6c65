"""Bytes of a step on real CPU tensors, and of the same step rehearsed, by phase, as JSON. A separate process, since a
rehearsal registers a device for good."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unirl.rehearsal.ledger import Ledger
from unirl.rehearsal.mode import Rehearsal
from unirl.types.devices import PRETEND


class Block(nn.Module):
    """Attention by hand and a convolution: the fused kernels of a CPU and of a GPU keep different things."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width]"""
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        scores = torch.softmax(query @ key.transpose(1, 2), -1)
        return x + F.gelu(self.conv((scores @ value).transpose(1, 2))).transpose(1, 2)


class Counted(TorchDispatchMode):
    """Counts real tensors as the rehearsal counts its own."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ledger.made(value for value in tree_leaves(out) if isinstance(value, Tensor))
        return out


def step(device: str, phase: Callable[[str], None]) -> tuple[object, ...]:
    """Two steps of AdamW in float32; what it returns is kept, so that nothing dies in between."""
    torch.manual_seed(0)
    phase("build")
    with torch.device(device):
        model = nn.Sequential(*[Block(24) for _ in range(3)])
        inputs = torch.randn(5, 7, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for number in range(2):
        phase(f"forward {number}")
        loss = model(inputs).square().mean()
        phase(f"backward {number}")
        loss.backward()
        del loss
        phase(f"optimizer {number}")
        optimizer.step()
        optimizer.zero_grad()
    phase("end")
    return model, optimizer, inputs


def main() -> None:
    """Both; the rehearsal first, since autograd asks for the devices of the process at its first backward."""
    rehearsal = Rehearsal()
    with rehearsal:
        pretended = step(PRETEND, rehearsal.enter_phase)
    real = Counted()
    with real:
        kept = step("cpu", real.ledger.enter_phase)
    pairs = {name: [peak.num_bytes, rehearsal.ledger.peaks[name].num_bytes] for name, peak in real.ledger.peaks.items()}
    pairs["alive"] = [real.ledger.device_bytes, rehearsal.ledger.device_bytes]
    sys.stdout.write(json.dumps(pairs))
    del kept, pretended


if __name__ == "__main__":
    main()
