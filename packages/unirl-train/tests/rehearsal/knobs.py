"""Most bytes of a training step with each option that saves memory, on real CPU tensors and rehearsed, as JSON.

A separate process, since a rehearsal registers a device for good.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from equal_bytes import Counted
from torch import Tensor, nn
from torch.nn import functional as F

from unirl.rehearsal.ledger import Ledger
from unirl.rehearsal.mode import Rehearsal
from unirl.train import host_memory, hosted_states
from unirl.train.backend import fsdp
from unirl.train.backend.activation_offload import offload_activations
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.types.devices import PRETEND
from unirl.types.training import OptimizerConfig

WIDTH, HEADS, TOKENS, ROWS = 64, 2, 128, 4
CASES: Mapping[str, dict[str, Any]] = {
    "none": {},
    "full": {"fsdp": FSDPConfig(activation_checkpointing="full")},
    "selective": {"fsdp": FSDPConfig(activation_checkpointing="selective")},
    "lora": {"lora": LoraConfig(rank=4, alpha=4.0)},
    "nf4": {"lora": LoraConfig(rank=4, alpha=4.0, base="nf4")},
    "8bit": {"optimizer": OptimizerConfig(1e-3, states="8bit")},
    "bf16": {"optimizer": OptimizerConfig(1e-3, states="bf16")},
    "hosted": {"optimizer": OptimizerConfig(1e-3, implementation="loop", offload=True)},
    "hosted 8bit": {"optimizer": OptimizerConfig(1e-3, states="8bit", offload=True)},
    **{
        f"offload {how}": {"fsdp": FSDPConfig(activation_checkpointing=how, activation_offload=True)}
        for how in (False, "full", "selective")
    },
}
"""Options of the backend by name."""


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width]"""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0))
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Bundle:
    """What a backend asks of a bundle."""

    block_class_names = ("Block",)
    lora_target_modules = ("qkv", "out")

    def __init__(self, device: str) -> None:
        with torch.device(device):
            self.model = nn.Sequential(*[Block() for _ in range(4)])

    def trainable_modules(self) -> dict[str, nn.Module]:
        return {"transformer": self.model}


def step(device: str, ledger: Ledger, phase: Callable[[str], None], options: dict[str, Any]) -> dict[str, int]:
    """Bytes of two steps of training."""
    torch.manual_seed(0)
    start = ledger.device_bytes
    bundle = Bundle(device)
    config = OptimizerConfig(1e-3, implementation="loop")
    before = ledger.device_bytes
    sharding = options.get("fsdp", FSDPConfig())
    if device == "cpu":  # where recipes may not ask for it
        options = {**options, "fsdp": replace(sharding, activation_offload=False)}
    backend = FSDPBackend(bundle, device=device, **{"optimizer": config, **options})  # ty: ignore[invalid-argument-type]
    if device == "cpu" and sharding.activation_offload:
        offload_activations(list(bundle.model), torch.device(device))
    state = ledger.device_bytes - before
    inputs = torch.randn(ROWS, TOKENS, WIDTH, device=device)
    for _ in range(2):
        phase("step")
        loss = bundle.model(inputs).square().mean()
        loss.backward()
        del loss
        phase("update")
        backend.optimizer_step(1.0)
        backend.zero_grad()
    peaks = {name: ledger.peaks[name].num_bytes - start for name in ("step", "update")}
    backend.close()
    return {**peaks, "state": state}


def _on_host(ledger: Ledger, like: Tensor, own: Callable[[Tensor], Tensor] = host_memory.host_memory) -> Tensor:
    """Memory for a copy, which counts as the host's."""
    made = own(like)
    ledger.leave(made)
    return made


def main() -> None:
    """Both; the rehearsals first, since autograd asks for the devices of the process at its first backward."""
    found: dict[str, dict[str, dict[str, int]]] = {name: {} for name in CASES}
    for kind, device in (("rehearsed", PRETEND), ("real", "cpu")):
        for name, options in CASES.items():
            mode = Rehearsal() if kind == "rehearsed" else Counted()
            with (
                mode,
                patch.object(host_memory, "host_memory", functools.partial(_on_host, mode.ledger)),
                patch.object(hosted_states, "VISIT_BYTES", 1 << 16),
                patch.object(fsdp, "check_offload"),
            ):
                phase = mode.enter_phase if isinstance(mode, Rehearsal) else mode.ledger.enter_phase
                found[name][kind] = step(device, mode.ledger, phase, options)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
