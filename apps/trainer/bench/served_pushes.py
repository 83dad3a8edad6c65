"""Measures pushes of 168 MB to the engines in their own processes, and prints Markdown.

    uv sync --project environments/vllm-cpu    # and sglang-cpu, vllm-omni-cpu
    uv run python apps/trainer/bench/served_pushes.py [vllm sglang sglang_diffusion vllm_omni] [--repeats 5]
        [--layouts LAYOUT ...]

A random Qwen3 or SD3 in float32 trains here; the engine is started by this process (layout "beside"), or by a worker of
Ray to which weights cross by a transport. A push is timed without its canary, as sync/seconds is: gathering, checksums,
transfer, and the engine's own loading with its proofs. The copy is one of the same bytes in memory. One engine runs at
a time; figures are medians.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import diffusers
import torch
from text_engines import larger_model
from torch import nn

import unirl.worlds.shapes
from unirl.distributed.group.framework import ray_module
from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.distributed.worker import WorkerContext
from unirl.rollout.engine.sglang_diffusion.engine import SGLangDiffusionEngine
from unirl.rollout.engine.sglang_llm.engine import SGLangRolloutEngine
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.rollout.engine.vllm_omni.engine import VLLMOmniEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.types.sampling import ARSamplingParams

ENVIRONMENTS = Path(__file__).parents[3] / "environments"


class Bundle:
    """What a backend trains."""

    block_class_names = ("Qwen3DecoderLayer", "JointTransformerBlock")

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The model."""
        return {"model": self.model}


class NoCanary:
    """Replays and samples nothing: pushes are timed without."""

    def check(self, *_: object) -> tuple[float, float]:
        """No gap."""
        return 0.0, 0.0

    def replay_only(self) -> None:
        """Nothing."""


def sd3(folder: Path) -> nn.Module:
    """The pipeline of the shapes world in a folder, with a random transformer of 42 million parameters."""
    torch.manual_seed(0)
    checkpoint = Path(next(iter(unirl.worlds.shapes.__path__))) / "checkpoint"
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    config = json.loads((checkpoint / "transformer" / "config.json").read_text())
    config |= {"num_layers": 6, "num_attention_heads": 7, "attention_head_dim": 64, "caption_projection_dim": 448}
    model: Any = diffusers.SD3Transformer2DModel.from_config(config)
    shutil.rmtree(folder / "transformer")
    model.save_pretrained(folder / "transformer")
    return model


@dataclass(frozen=True)
class Case:
    """An engine, the environment of its process, the model that it serves, and what else it needs."""

    environment: str
    engine: Callable[..., Any]
    model: Callable[[Path], nn.Module]
    options: dict[str, int]


CASES = {
    "vllm": Case("vllm-cpu", VLLMRolloutEngine, larger_model, {"context_length": 256, "kv_cache_bytes": 64 << 20}),
    "sglang": Case("sglang-cpu", SGLangRolloutEngine, larger_model, {"context_length": 256, "kv_cache_tokens": 4096}),
    "sglang_diffusion": Case("sglang-cpu", SGLangDiffusionEngine, sd3, {"forward_batch_size": 8}),
    "vllm_omni": Case("vllm-omni-cpu", VLLMOmniEngine, sd3, {"forward_batch_size": 8}),
}


def start(name: str, folder: str) -> Any:  # Any: one of the engines
    """An engine of a folder, which encodes and decodes nothing."""
    case = CASES[name]
    python = str(ENVIRONMENTS / case.environment / ".venv" / "bin" / "python")
    return case.engine(None, model=folder, device="cpu", python=python, dtype="fp32", **case.options)


def build_engine(name: str, folder: str, context: WorkerContext) -> dict[str, object]:
    """A worker with an engine alone."""
    torch.set_num_threads(1)
    return {"engine": start(name, folder)}


def seconds(work: Callable[[], object]) -> float:
    """Wall time of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Trainer:
    """What is pushed from."""

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        bundle: Any = Bundle(model)
        self._backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-3))
        self._tensors = dict(self._backend.weight_source.weights())
        self._copies = {name: torch.empty_like(tensor) for name, tensor in self._tensors.items()}
        self._bucket_bytes = bucket_bytes
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def sync(self, transport: Any) -> FullWeightSync:  # Any: one of the transports, None beside
        """A sync to connect."""
        pipeline: Any = None
        sync = FullWeightSync(
            self._backend,
            None,
            pipeline,
            sampling=ARSamplingParams(temperature=1.0),
            dtype="fp32",
            bucket_bytes=self._bucket_bytes,
            transport=transport,
        )
        canary: Any = NoCanary()
        sync._canary = canary
        return sync

    def measured(self, sync: FullWeightSync, repeats: int) -> tuple[float, float]:
        """Medians of a push and of a copy; every weight changes before each push, the first warms up."""
        pushes, copies = [], []
        for _ in range(repeats + 1):
            with torch.no_grad():
                for parameter in self._backend.parameters.values():
                    parameter.mul_(1.0 + 1e-6)
            copies.append(seconds(lambda: [self._copies[name].copy_(own) for name, own in self._tensors.items()]))
            pushes.append(sync.push()["sync/seconds"])
        return statistics.median(pushes[1:]), statistics.median(copies[1:])


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", default=list(CASES))
    parser.add_argument("--layouts", nargs="*", default=["beside", "ipc", "files", "nccl"])
    parser.add_argument("--bucket-megabytes", type=float, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| engine | layout | MB | push, ms | copy, ms | push / copy |", "|---|---|---|---|---|---|"]
    for name in options.engines:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            trainer = Trainer(CASES[name].model(folder), int(options.bucket_megabytes * 1e6))
            for layout in options.layouts:
                if layout == "beside":
                    push, copy = beside(trainer, name, folder, options.repeats)
                else:
                    push, copy = apart(trainer, name, folder, layout, options.repeats)
                cells = f"{trainer.num_bytes / 1e6:.0f} | {push * 1e3:,.0f} | {copy * 1e3:,.0f} | {push / copy:.1f}"
                lines.append(f"| `{name}` | {layout} | {cells} |")
                sys.stderr.write(f"{lines[-1]}\n")
    sys.stdout.write("\n".join(lines) + "\n")


def beside(trainer: Trainer, name: str, folder: Path, repeats: int) -> tuple[float, float]:
    """A push to an engine that this process started."""
    sync, engine = trainer.sync(None), start(name, str(folder))
    try:
        sync.connect(engine)
        sync.prepare()
        return trainer.measured(sync, repeats)
    finally:
        engine.shutdown()


def apart(trainer: Trainer, name: str, folder: Path, transport: str, repeats: int) -> tuple[float, float]:
    """A push to an engine that a worker of Ray started."""
    ray_module().init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**9
    )
    build = functools.partial(build_engine, name, str(folder))
    runtime = RayRuntime(build, num_devices=1, device="cpu", timeout_s=600)
    sync = trainer.sync(transport)
    try:
        sync.connect_elsewhere(runtime.remote_role("engine"))
        sync.prepare()
        return trainer.measured(sync, repeats)
    finally:
        sync.close()
        runtime.close()
        ray_module().shutdown()


if __name__ == "__main__":
    sys.exit(main())
