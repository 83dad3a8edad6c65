"""Steps of two ranks with FSDPBackend and with VeOmniBackend."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor
from train_fakes import SpreadBundle, TinyBundle, lora_config, run_backward, snapshot, train_step, whole

from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.veomni import VeOmniBackend
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
    """The gradients of the first step and the state after three."""
    bundle = SpreadBundle() if case == "shared_samples" else TinyBundle()
    backend = make(bundle, optimizer=OptimizerConfig(learning_rate=1e-2), ema=EMAConfig(), **CASES[case])
    assert backend.is_sharded
    run_backward(backend, bundle.model, 0)
    gradients = {f"gradient {name}": whole(p.grad) for name, p in backend.parameters.items() if p.grad is not None}
    backend.keep_policy("old")
    for step in range(3):
        train_step(backend, bundle.model, step)
    return {**gradients, **snapshot(backend)}


def steps_of_both() -> dict[str, Any]:
    """By case: names of what differs, and the two gradient norms of a model, ours and VeOmni's."""
    found: dict[str, Any] = {}
    for case in CASES:
        ours, veomnis = (steps_of(make, case) for make in (FSDPBackend, VeOmniBackend))
        assert ours.keys() == veomnis.keys()
        found[case] = [name for name, value in ours.items() if not bool((value == veomnis[name]).all())]
    bundle = TinyBundle()
    backend = VeOmniBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2))
    run_backward(backend, bundle.model, 0)
    clipping: Any = importlib.import_module("veomni.distributed.clip_grad_norm")  # Any: an optional library
    states: Any = importlib.import_module("veomni.distributed.parallel_state")  # Any: as above
    # The ambient state of this process is that of the first topology; a model's is its own mesh.
    with states.use_parallel_state(states.ParallelState(dp_size=2, dp_shard_size=2)):
        veomnis_norm = clipping.veomni_clip_grad_norm(bundle.model, float("inf"))
    return {**found, "norms": [backend.optimizer_step(1.0).grad_norm, veomnis_norm]}
