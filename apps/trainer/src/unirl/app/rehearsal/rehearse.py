"""Runs one rank's share of a recipe on the pretend device, and says what it held, computed and sent."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.algorithms.base import StageAlgorithm
from unirl.app.rehearsal.share import Share, share_of
from unirl.config.runs import ComposedRun
from unirl.distributed.held import Held
from unirl.distributed.runtime import LocalRuntime
from unirl.distributed.worker import WorkerContext
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.rehearsal.device import join_group
from unirl.rehearsal.ledger import Peak
from unirl.rehearsal.mode import Counts, Rehearsal
from unirl.rehearsal.repeats import Repeats
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.optim import local_part
from unirl.trainer.build.assembly import make_trainer
from unirl.trainer.build.worker import build_components
from unirl.trainer.clock import PhaseClock
from unirl.trainer.policy import role_name
from unirl.trainer.roles import StackRole
from unirl.types.batch import Batch
from unirl.types.devices import has_values
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import ModelBundle
from unirl.types.roles import MeshPlace
from unirl.types.rollout import RolloutResp

ACTIVATIONS, OPTIMIZER, GRADIENTS, COPIES = "activations", "optimizer", "gradients", "copies"
TEXT_ENCODERS = "text encoders"
CATEGORIES = {"parameters": "trained weights", "optimizer": OPTIMIZER}
"""What training keeps, by the beginning of its name in the saved state; the rest is copies."""
SAMPLES = "samples"
"""Category of media, conditions and trajectories that wait to be trained on."""


@dataclass(frozen=True)
class Rehearsed:
    """What one step took of one rank."""

    recipe: str
    num_ranks: int
    num_samples: int
    """In a rollout of the recipe."""
    num_made: int
    num_trained: int
    peaks: Mapping[str, Peak]
    """Most bytes on the device by phase."""
    host_bytes: int
    """Most bytes of weights and states that rested in host memory."""
    flops: Mapping[str, int]
    """By phase, of the whole share."""
    collectives: Mapping[str, Mapping[str, int]]
    """Bytes by phase and kind."""
    reads: Mapping[str, int]
    """How often the device was read, by place in the code."""
    cpu_s: float
    notes: tuple[str, ...]

    @property
    def most(self) -> str:
        """The phase that takes most of the device."""
        return max(self.peaks, key=lambda phase: self.peaks[phase].num_bytes)


class _RankZero(LocalRuntime):
    """One worker, whose samples are all that the driver asks for: a rank's share of the batch."""

    def _places(self) -> list[MeshPlace]:
        return [MeshPlace()]


def rehearse(run: ComposedRun) -> Rehearsed:
    """One step of a checked run, and the rollout of the next.

    Raises ConfigError for a recipe that cannot be rehearsed.
    """
    import diffusers  # noqa: F401 - libraries make tensors while they are imported, which the mode would take for the run's
    import peft  # noqa: F401
    import transformers  # noqa: F401

    began = time.process_time()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        share = share_of(run, folder)
        mode = Rehearsal()
        join_group(share.num_ranks)
        try:
            with mode:
                sample_bytes, counts = _step(share, mode, folder / "run")
        finally:
            torch.distributed.destroy_process_group()
    peaks = {name: _with_others(name, peak, share, sample_bytes) for name, peak in mode.ledger.peaks.items()}
    return Rehearsed(
        recipe=str(run.resolved["recipe"]),
        num_ranks=share.num_ranks,
        num_samples=share.num_samples,
        num_made=share.num_made,
        num_trained=share.num_trained,
        peaks={name: peak for name, peak in peaks.items() if peak.num_bytes and name != "other"},
        host_bytes=mode.ledger.host_peak,
        flops=_scaled(counts.flops, share),
        collectives={phase: dict(found) for phase, found in counts.collectives.items()},
        reads=dict(counts.reads),
        cpu_s=time.process_time() - began,
        notes=share.notes,
    )


def _step(share: Share, mode: Rehearsal, run_dir: Path) -> tuple[int, Counts]:
    """Build, make a rollout to see what samples hold, and then a step: rollout, updates, push, and the next rollout,
    which has the gradients in memory that the updates left.

    Returns the bytes of a sample, and what the step computed and sent.
    """
    run_dir.mkdir()
    clock = PhaseClock()

    @contextmanager
    def observed(phase: str) -> Generator[None]:
        mode.enter_phase(phase)
        mode.ledger.category = ACTIVATIONS
        yield
        mode.enter_phase("other")

    def builder(context: WorkerContext) -> Mapping[str, object]:
        return build_components(share.run, str(run_dir), context)

    with _RankZero(builder, device=share.run.device) as runtime:
        bundles, backends = _models(share.run, runtime)
        for bundle in bundles:
            _label_models(mode, bundle)
        reward: Any = runtime.component("reward")  # Any: a service of `DrawnScorer`s
        for scorer in reward.scorers.values():
            mode.ledger.label((each for module in scorer.modules() for each in _weights(module)), "reward models")
        _label(mode, backends)
        mode.enter_phase("prepare")
        trainer = make_trainer(share.run, runtime, run_dir, [], threading.Event(), clock)
        trainer.prepare()
        _label(mode, backends)
        clock.observer = observed
        modules = [module for bundle in bundles for module in bundle.trainable_modules().values()]
        with Repeats(mode).active(modules, _algorithms(share.run, runtime)):
            sample_bytes = _bytes_of_samples(trainer.collector.collect(0).resp) // share.num_made
            mode.counts = Counts()
            rollout = trainer.collector.collect(1).resp
            rows = range(min(share.num_trained, rollout.meta.batch_size))
            chosen = runtime.gather([(rollout, rows)])
            rollout.release()
            with clock.phase("train"):
                runtime.role("stack", StackRole).train(chosen, progress=0.0)
            chosen.release()
            _label(mode, backends)
            if share.pushes:
                with observed("push"):
                    for backend in backends:
                        for _ in backend.weight_source.weights():
                            pass
            counts, mode.counts = mode.counts, Counts()
            trainer.collector.collect(2).resp.release()
    return sample_bytes, counts


def _bytes_of_samples(resp: Held) -> int:
    """Bytes that a response holds on the device."""
    with resp:
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage()
            for tensor in _tensors(resp.map(_itself))
            if not has_values(tensor.device)
        }
        return sum(storage.nbytes() for storage in storages.values())


def _itself(value: RolloutResp) -> RolloutResp:
    return value


def _models(run: ComposedRun, runtime: LocalRuntime) -> tuple[list[ModelBundle], list[FSDPBackend]]:
    """Bundles and backends of the policies that train."""
    bundles: list[ModelBundle] = []
    backends: list[FSDPBackend] = []
    for name in run.policies:
        bundle: Any = runtime.component(role_name(name, "bundle", run.all_policies))  # Any: by its role
        backend = runtime.component(role_name(name, "backend", run.all_policies))
        if not isinstance(backend, FSDPBackend):
            raise ConfigError(f"{type(backend).__name__} of policy {name} is not rehearsed, only FSDPBackend.")
        bundles.append(bundle)
        backends.append(backend)
    return bundles, backends


def _algorithms(run: ComposedRun, runtime: LocalRuntime) -> Iterator[StageAlgorithm]:
    for name, policy in run.policies.items():
        for track in policy.algorithms:
            own = "algorithm" if len(policy.algorithms) == 1 else f"algorithm/{track}"
            algorithm: Any = runtime.component(role_name(name, own, run.all_policies))  # Any: by its role
            yield algorithm


def _label_models(mode: Rehearsal, bundle: ModelBundle) -> None:
    """Name what a model is made of."""
    if isinstance(bundle, DiffusersBundle):
        for name, module in bundle.modules.items():
            mode.ledger.label(map(local_part, _weights(module)), name)
        for encoder in bundle.text.encoders.values():
            mode.ledger.label(_weights(encoder), TEXT_ENCODERS)
    else:
        for name, module in bundle.trainable_modules().items():
            mode.ledger.label(map(local_part, _weights(module)), name)


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _label(mode: Rehearsal, backends: Iterable[FSDPBackend]) -> None:
    """Name what training keeps."""
    for backend in backends:
        for name, tensor in backend.state_dict().items():
            mode.ledger.label([local_part(tensor)], CATEGORIES.get(name.split("/")[0], COPIES))
        gradients = [parameter.grad for parameter in backend.parameters.values() if parameter.grad is not None]
        mode.ledger.label(map(local_part, gradients), GRADIENTS)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Batch):
        yield from _tensors(vars(value))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _with_others(phase: str, peak: Peak, share: Share, sample_bytes: int) -> Peak:
    """A peak with the samples of this rank that were not in memory then."""
    there = {"rollout": share.num_made, "reward": share.num_made, "train": share.num_trained}.get(phase)
    if there is None:
        return peak
    others = sample_bytes * (share.num_samples - there)
    return Peak(peak.num_bytes + others, {**peak.parts, SAMPLES: peak.parts.get(SAMPLES, 0) + others})


def _scaled(flops: Counter[str], share: Share) -> dict[str, int]:
    """The operations of all samples of this rank."""
    times = {"rollout": share.num_samples / share.num_made, "train": share.num_samples / share.num_trained}
    return {phase: round(found * times.get(phase, 1)) for phase, found in flops.items()}
