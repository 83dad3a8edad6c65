"""Measures weight pushes to an engine with a copy of the model on this machine, and prints Markdown.

    uv run python apps/trainer/bench/pushes.py [--megabytes 168] [--repeats 5]
        [--transports ray files ipc nccl] [--changed all tensors elements] [--device auto] [--json]

A model of linear layers in float32 trains here; the engine is in this process ("beside"), and then in a worker of Ray,
to which its weights cross by each transport. A push is timed without its canary, as sync/seconds is: gathering,
checksums of both sides, transfer, and loading. "Changed" pushes after a tenth of the tensors have changed, and only
they travel; "elements" after a fiftieth of the elements of each tensor has. The copy is one of the same bytes in
memory, "checksums" are those of one side as pushes compute them, and by each kind. With an accelerator
(`--device auto`) both sides keep their weights on it. Everything takes turns, so that a busy machine is busy for all;
figures are medians. Parts of a push are those of the sender (gather, sums, pack) and of the engine (open, verify,
load); both sides work at once, so parts add up to more than the push.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from torch import nn

from unirl.app.environment import device_here
from unirl.distributed.group.device_pool import reserved
from unirl.distributed.group.framework import ray_module
from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.weight_sync import slices
from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.distributed.weight_sync.remote_engines import RemoteEngines
from unirl.distributed.weight_sync.transports.base import ObjectParcel
from unirl.distributed.weight_sync.transports.broadcast import BroadcastParcel
from unirl.distributed.weight_sync.transports.files import FileParcel
from unirl.distributed.weight_sync.transports.ipc import DeviceParcel
from unirl.distributed.worker import WorkerContext
from unirl.rollout.engine.replica.base import PushedWeights
from unirl.rollout.engine.replica.weights import ReplicaWeights
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.types import weights
from unirl.types.conditions import PromptCondition
from unirl.types.device_kinds import CPU, KINDS, kind_of
from unirl.types.devices import accelerator, in_use, num_devices
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment
from unirl.types.weights import SumKind, WeightBucket, WeightReceipt, tensor_checksums, weight_specs

WIDTH = 1024
NUM_CHANGED = 10
"""One of so many tensors changes between two pushes."""
NUM_ELEMENTS = 50
"""Or one of so many elements of each."""
KINDS_OF_SUMS: dict[str, SumKind] = {"xxh3 (on the host)": "xxh3_128", "words (where they lie)": "words_128"}
PARTS = ("gather", "sums", "pack", "open", "verify", "load")
MODES = {"": "all", ", changed": "tensors", ", elements": "elements"}
"""What a sync is called by what of the model it pushes."""


class Layers(nn.Module):
    """Linear layers of `megabytes` in float32."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        num = max(1, round(megabytes * 1e6 / (4 * WIDTH * (WIDTH + 1))))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(num)])


class Bundle:
    """What a backend trains."""

    block_class_names = ("Linear",)

    def __init__(self, megabytes: float) -> None:
        torch.manual_seed(0)
        self.model = Layers(megabytes)

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The model."""
        return {"transformer": self.model}


class SilentPipeline:
    """A language model whose log-probs are all 0: pushes are timed without the canary, which has to pass."""

    def encode(self, primitives: Mapping[str, Any], params: ARSamplingParams) -> dict[str, PromptCondition]:
        """One token per prompt."""
        return {"prompt": PromptCondition.pack(tokens=[torch.tensor([1]) for _ in primitives["text"].texts])}

    def evaluating(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def replay(self, conditions: object, segment: TextSegment, params: ARSamplingParams) -> SimpleNamespace:
        """Zeros."""
        return SimpleNamespace(logp_N=torch.zeros(segment.tokens.numel()))


class Parts:
    """Seconds of the parts of pushes. On a device each ends with a wait for it anyway."""

    def __init__(self) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, name: str) -> Generator[None]:
        """Context whose seconds count for a part."""
        begin = time.perf_counter()
        yield
        self._spent[name] += time.perf_counter() - begin

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls count for a part."""

        def call(*args: Any, **options: Any) -> Any:
            with self.of(name):
                return work(*args, **options)

        return call

    def iterated(self, name: str, work: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """The generator, whose steps count for a part."""

        def call(*args: Any, **options: Any) -> Iterator[Any]:
            step = self.timed(name, work(*args, **options).__next__)
            while True:
                try:
                    yield step()
                except StopIteration:
                    return

        return call

    def taken(self) -> dict[str, float]:
        """The seconds since the last call."""
        spent, self._spent = dict(self._spent), defaultdict(float)
        return spent


class CopyEngine(PushedWeights):
    """The weights of a replica engine, and canned samples. spent: counts the parts of pushes on this side."""

    def __init__(self, megabytes: float, device: torch.device, spent: Parts) -> None:
        self._weights = ReplicaWeights({"transformer": Layers(megabytes)}, torch.float32, device, 0)
        self._spent = spent

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def receive_weights(self, bucket: WeightBucket) -> None:
        """As every replica."""
        with self._spent.of("verify"):
            super().receive_weights(bucket)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """As every replica."""
        with self._spent.of("load"):
            return super().finish_weights(policy_version, policy)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def parts(self) -> dict[str, float]:
        """Seconds of the parts of pushes since the last call."""
        return self._spent.taken()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Three tokens per prompt, of log-prob 0."""
        num = req.batch_size
        segment = TextSegment.pack(tokens=[torch.zeros(3, dtype=torch.long)] * num, log_probs=[torch.zeros(3)] * num)
        track = req.make_root_track(conditions={}, segment=segment, decoded=None)
        return RolloutResp(tracks={"text": track.replace(policy_versions=torch.full((num,), self.policy_version))})


def build_engine(megabytes: float, context: WorkerContext) -> dict[str, object]:
    """A worker with an engine alone."""
    torch.set_num_threads(1)
    spent = Parts()
    for parcel in (ObjectParcel, FileParcel, DeviceParcel, BroadcastParcel):
        # Counts what comes before the engine: mapping, copying out of Ray, broadcasts.
        parcel.opened = _opened(parcel.opened, spent)  # ty: ignore[invalid-assignment]
    return {"engine": CopyEngine(megabytes, torch.device(context.device), spent)}


def _opened(opened: Callable[..., Any], spent: Parts) -> Callable[..., Any]:
    def call(parcel: object, kept: dict[str, Any]) -> Any:
        with spent.of("open"):
            return opened(parcel, kept)

    return call


class Trainer:
    """What is pushed from."""

    def __init__(self, megabytes: float, device: str) -> None:
        bundle: Any = Bundle(megabytes)
        self.backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-3), device=device)
        self.tensors = {name: parameter.detach() for name, parameter in bundle.model.named_parameters()}
        self.copies = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        self.spent = Parts()
        source: Any = self.backend.weight_source
        source.weights = self.spent.iterated("gather", source.weights)
        source.shards = self.spent.iterated("gather", source.shards)
        slices.tensor_checksums = self.spent.timed("sums", slices.tensor_checksums)  # ty: ignore[invalid-assignment]
        for name in ("weight_spec", "weight_specs"):
            setattr(weights, name, self.spent.timed("sums", getattr(weights, name)))

    def sync(self, bucket_bytes: int, **options: Any) -> FullWeightSync:  # Any: as FullWeightSync
        """A sync to connect."""
        pipeline: Any = SilentPipeline()
        sampling = ARSamplingParams(temperature=1.0)
        return FullWeightSync(
            self.backend, None, pipeline, sampling=sampling, dtype="fp32", bucket_bytes=bucket_bytes, **options
        )

    def copy(self) -> None:
        """A memory copy of all weights."""
        for name, tensor in self.tensors.items():
            self.copies[name].copy_(tensor)

    def change(self, changed: str) -> None:
        """Change some tensors, or some elements of each."""
        for number, tensor in enumerate(self.tensors.values()):
            if changed == "elements":
                tensor.view(-1)[::NUM_ELEMENTS] += 1e-3
            elif number % NUM_CHANGED == 0:
                tensor.add_(1e-3)


def seconds(work: Callable[[], object]) -> float:
    """Wall time of a call, and of what it leaves a GPU to do."""
    begin = time.perf_counter()
    work()
    if in_use() is not None:
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Measure, and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=168)
    parser.add_argument("--bucket-megabytes", type=float, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--transports", nargs="*", default=["ray", "files", "ipc", "nccl"])
    parser.add_argument("--changed", nargs="*", default=list(MODES.values()), choices=MODES.values())
    parser.add_argument("--device", default=CPU, choices=["auto", *KINDS])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = device_here()
    found = measured(options)
    sys.stdout.write(f"{json.dumps(found)}\n" if options.json else table(found))


def measured(options: argparse.Namespace) -> dict[str, Any]:  # Any: JSON
    """Megabytes and median seconds of every work and push."""
    torch.set_num_threads(1)
    trainer = Trainer(options.megabytes, options.device)
    total = sum(tensor.numel() * 4 for tensor in trainer.tensors.values()) / 1e6
    with connected(options, trainer) as syncs:
        spent, sent, parts = timed(options.repeats, trainer, syncs)
    medians = {name: statistics.median(taken) for name, taken in spent.items()}
    rows = {name: {"megabytes": sent.get(name, total), "seconds": taken} for name, taken in medians.items()}
    return {
        "megabytes": total,
        "tensors": len(trainer.tensors),
        "device": options.device,
        "works": {name: row for name, row in rows.items() if name not in syncs},
        "pushes": {name: row for name, row in rows.items() if name in syncs},
        "parts": {
            name: {part: statistics.median(each.get(part, 0.0) for each in taken) for part in taken[0]}
            for name, taken in parts.items()
        },
    }


@contextmanager
def connected(options: argparse.Namespace, trainer: Trainer) -> Generator[dict[str, tuple[FullWeightSync, str]]]:
    """Syncs by name, each with what it pushes of the model, until their engines are closed."""
    bucket_bytes = int(options.bucket_megabytes * 1e6)
    beside = CopyEngine(options.megabytes, torch.device(options.device), trainer.spent)
    syncs = {}
    modes = [(suffix, changed) for suffix, changed in MODES.items() if changed in options.changed]
    for suffix, changed in modes:
        syncs[f"beside{suffix}"] = trainer.sync(bucket_bytes, changed=changed), changed
        syncs[f"beside{suffix}"][0].connect(beside)
    if not options.transports:
        yield syncs
        return
    here = accelerator()
    ray_module().init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=10**9,
        **({} if here is None else reserved(here, num_devices(here.name))),
    )
    runtime = RayRuntime(_Builder(options.megabytes), num_devices=1, device=options.device, timeout_s=120)
    try:
        for transport in options.transports:
            for suffix, changed in modes:
                sync = trainer.sync(bucket_bytes, changed=changed, transport=transport)
                # Of several devices the worker has the first, as this process has.
                sync.connect_elsewhere(
                    runtime.remote_role("engine"), shares_device=kind_of(options.device).shares_memory
                )
                sender: Any = sync._engine
                for method in {"pack", "begin", "write"} & set(dir(sender._transport)):
                    own = getattr(sender._transport, method)
                    setattr(sender._transport, method, trainer.spent.timed("pack", own))
                syncs[f"{transport}{suffix}"] = sync, changed
        yield syncs
    finally:
        runtime.close()
        ray_module().shutdown()


def timed(
    repeats: int, trainer: Trainer, syncs: Mapping[str, tuple[FullWeightSync, str]]
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, list[dict[str, float]]]]:
    """Seconds of every work in each repeat after one to warm up, megabytes of the pushes, seconds of their parts."""
    spent: dict[str, list[float]] = {name: [] for name in ("copy", "checksums", *KINDS_OF_SUMS, *syncs)}
    sent: dict[str, float] = {}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in syncs}
    for repeat in range(repeats + 1):
        works = {
            "copy": seconds(trainer.copy),
            "checksums": seconds(lambda: weight_specs(trainer.tensors)),
            **{
                name: seconds(lambda kind=kind: tensor_checksums(trainer.tensors.values(), kind))
                for name, kind in KINDS_OF_SUMS.items()
            },
        }
        for name, (sync, changed) in syncs.items():
            if changed != "all":
                sync.push()
                trainer.change(changed)
            taken_parts(trainer, sync)
            metrics = sync.push()
            if repeat:
                parts[name].append(taken_parts(trainer, sync))
            works[name], sent[name] = metrics["sync/seconds"], metrics["sync/megabytes"]
            if changed != "all":
                sync._forget()  # the other syncs push to the same engine
        for name, taken in works.items():
            if repeat:
                spent[name].append(taken)
    return spent, sent, parts


def taken_parts(trainer: Trainer, sync: FullWeightSync) -> dict[str, float]:
    """Seconds of the parts of pushes on both sides since the last call."""
    engine: Any = sync._engine
    there = engine._role.call("parts")[0] if isinstance(engine, RemoteEngines) else {}
    return {**trainer.spent.taken(), **there}


def table(found: Mapping[str, Any]) -> str:  # Any: JSON
    """What was measured as Markdown."""
    copy = found["works"]["copy"]["seconds"]
    lines = [
        f"{found['megabytes']:.0f} MB in {found['tensors']} tensors",
        "",
        "| | MB sent | ms | / copy |",
        "|---|---|---|---|",
    ]
    for name, row in {**found["works"], **found["pushes"]}.items():
        lines.append(f"| {name} | {row['megabytes']:.0f} | {row['seconds'] * 1e3:,.0f} | {row['seconds'] / copy:.1f} |")
    lines += ["", f"| parts, ms | {' | '.join(PARTS)} |", f"|---|{'---|' * len(PARTS)}"]
    for name, taken in found["parts"].items():
        cells = (f"{taken[part] * 1e3:,.0f}" if part in taken else "" for part in PARTS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


class _Builder:
    """`build_engine` for one size; pickles."""

    def __init__(self, megabytes: float) -> None:
        self._megabytes = megabytes

    def __call__(self, context: WorkerContext) -> dict[str, object]:
        return build_engine(self._megabytes, context)


if __name__ == "__main__":
    sys.exit(main())
