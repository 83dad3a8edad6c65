"""Steps of two ranks with FSDPBackend and with VeOmniBackend."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_fakes import SpreadBundle, TinyBundle, lora_config, run_backward, snapshot, train_step, whole

from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.veomni import VeOmniBackend
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import EMAConfig, FSDPConfig, TrainTopology
from unirl.types.training import OptimizerConfig

CASES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "replicated": {"topology": TrainTopology(dp_replicate=2)},
    "shared_samples": {"topology": TrainTopology(sp=2)},
    "lora": {"lora": lora_config()},
    "bf16": {"fsdp": FSDPConfig(param_dtype="bf16")},
    "recomputed": {"fsdp": FSDPConfig(activation_checkpointing=True, reshard_after_forward=False)},
}


def steps_of(make: type[FSDPBackend], case: str) -> dict[str, Tensor]:
    """The gradients of the first step, the state after three and the shards that are pushed then."""
    bundle = SpreadBundle() if case == "shared_samples" else TinyBundle()
    backend = make(bundle, optimizer=OptimizerConfig(learning_rate=1e-2), ema=EMAConfig(), **CASES[case])
    assert backend.is_sharded
    run_backward(backend, bundle.model, 0)
    gradients = {f"gradient {name}": whole(p.grad) for name, p in backend.parameters.items() if p.grad is not None}
    backend.keep_policy("old")
    for step in range(3):
        train_step(backend, bundle.model, step)
    shards = {f"shard {each.name} {each.start}": each.rows.clone() for each in backend.weight_source.shards("old")}
    return {**gradients, **snapshot(backend), **shards}


def resumed(saves: type[FSDPBackend], loads: type[FSDPBackend], folder: Path) -> list[str]:
    """What differs a step after a checkpoint, between the backend that saved it and another that loaded it."""
    states = []
    for make in (saves, loads):
        bundle = TinyBundle()  # a frozen base is in no checkpoint
        torch.manual_seed(len(states))  # and adapters are
        backend = make(bundle, optimizer=OptimizerConfig(learning_rate=1e-2), lora=lora_config(), ema=EMAConfig())
        if make is saves:
            train_step(backend, bundle.model, 0)
            Checkpointer(backend, str(folder)).save(1, {})
        else:
            Checkpointer(backend, str(folder)).load()
        train_step(backend, bundle.model, 1)
        states.append(snapshot(backend))
    return differences(*states)


def differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of what has other bits."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def steps_of_both(folder: Path) -> dict[str, Any]:
    """By case and way of resuming, names of what differs; and the two gradient norms of a model, ours and VeOmni's."""
    found: dict[str, Any] = {}
    for case in CASES:
        found[case] = differences(*(steps_of(make, case) for make in (FSDPBackend, VeOmniBackend)))
    found["saved by VeOmni's"] = resumed(VeOmniBackend, FSDPBackend, folder / "veomni")
    found["loaded by VeOmni's"] = resumed(FSDPBackend, VeOmniBackend, folder / "fsdp")
    bundle = TinyBundle()
    backend = VeOmniBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2))
    run_backward(backend, bundle.model, 0)
    clipping: Any = importlib.import_module("veomni.distributed.clip_grad_norm")  # Any: an optional library
    states: Any = importlib.import_module("veomni.distributed.parallel_state")  # Any: as above
    # The ambient state of this process is that of the first topology; a model's is its own mesh.
    with states.use_parallel_state(states.ParallelState(dp_size=2, dp_shard_size=2)):
        veomnis_norm = clipping.veomni_clip_grad_norm(bundle.model, float("inf"))
    return {**found, "norms": [backend.optimizer_step(1.0).grad_norm, veomnis_norm]}
