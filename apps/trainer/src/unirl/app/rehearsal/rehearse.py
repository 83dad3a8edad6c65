"""Runs one rank's share of a recipe on the pretend device, and says what it held, computed and sent."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.app.rehearsal.branching import Branching
from unirl.app.rehearsal.categories import (
    ACTIVATIONS,
    COPIES,
    GRADIENTS,
    OF_STATE,
    REWARD_MODELS,
    SAMPLES,
    TEXT_ENCODERS,
)
from unirl.app.rehearsal.engines import SAMPLING, with_engines
from unirl.app.rehearsal.share import ANSWER_TOKENS, Share, Work, share_of
from unirl.app.rehearsal.texts import longest_texts
from unirl.config.runs import ComposedRun
from unirl.distributed.held import Held
from unirl.distributed.runtime import LocalRuntime
from unirl.distributed.worker import WorkerContext
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.rehearsal.blocks import Blocks
from unirl.rehearsal.device import join_group
from unirl.rehearsal.kernels import kernels_of
from unirl.rehearsal.ledger import Peak
from unirl.rehearsal.mode import Counts, Rehearsal
from unirl.rehearsal.operators import Call, summed, total_flops
from unirl.rehearsal.repeats import Repeats, TrainingPart, replaced
from unirl.rehearsal.steps import steps_alike
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.shards import local_part
from unirl.trainer.build.assembly import make_evaluator, make_trainer
from unirl.trainer.build.worker import build_components
from unirl.trainer.clock import PhaseClock
from unirl.trainer.collector import Collector
from unirl.trainer.policy import numbered, role_name
from unirl.trainer.roles import StackRole
from unirl.types.batch import Batch
from unirl.types.devices import has_values
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import ModelBundle
from unirl.types.roles import MeshPlace
from unirl.types.rollout import RolloutResp

BETWEEN = ("other", "residency")
"""Phases in which nothing is computed."""


@dataclass(frozen=True)
class Rehearsed:
    """What one step took of one rank."""

    recipe: str
    num_ranks: int
    works: Mapping[str, Work]
    """By track."""
    peaks: Mapping[str, Peak]
    """Most bytes on the device by phase."""
    host_bytes: int
    """Most bytes of weights, states and activations that rested in host memory."""
    operators: Mapping[str, Mapping[Call, float]]
    """Calls by phase, of the whole share."""
    collectives: Mapping[str, Mapping[str, int]]
    """Bytes by phase and kind, of the samples that were made and trained on."""
    times: Mapping[str, float]
    """How often what was made stands in a step, by phase where it is not once."""
    reads: Mapping[str, int]
    """How often the device was read, by place in the code."""
    cpu_s: float
    notes: tuple[str, ...]

    @property
    def flops(self) -> dict[str, float]:
        """By phase, of the whole share."""
        return {phase: total_flops(operators) for phase, operators in self.operators.items()}

    @property
    def most(self) -> str:
        """The phase that takes most of the device."""
        return max(self.peaks, key=lambda phase: self.peaks[phase].num_bytes)


class _RankZero(LocalRuntime):
    """One worker, whose samples are all that the driver asks for: a rank's share of the batch."""

    def _places(self) -> list[MeshPlace]:
        return [MeshPlace()]


def rehearse(run: ComposedRun, device_bytes: float, answer_tokens: int = ANSWER_TOKENS) -> Rehearsed:
    """One step of a checked run, and the rollout of the next.

    device_bytes: memory of a device, of which some engines take a share. answer_tokens: of what an environment answers
    to a turn.
    Raises ConfigError for a recipe that cannot be rehearsed.
    """
    import diffusers  # noqa: F401 - libraries make tensors while they are imported, which the mode would take for the run's
    import peft  # noqa: F401
    import transformers  # noqa: F401

    began = time.process_time()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        share = share_of(run, folder, answer_tokens)
        mode = Rehearsal()
        join_group(share.num_ranks)
        try:
            with mode, kernels_of(run.device):
                step = _step(share, mode, folder / "run")
        finally:
            torch.distributed.destroy_process_group()
    peaks = {name: peak for name, peak in mode.ledger.peaks.items() if peak.num_bytes and name not in BETWEEN}
    peaks = {name: _with_others(name, peak, share, step) for name, peak in peaks.items()}
    return Rehearsed(
        recipe=str(run.resolved["recipe"]),
        num_ranks=share.num_ranks,
        works=share.works,
        peaks=with_engines(peaks, run, share, step.weights, device_bytes) if share.apart else peaks,
        host_bytes=mode.ledger.host_peak,
        operators=_operators(step, share),
        collectives={
            phase: dict(found)
            for phase, found in step.counts.collectives.items()
            if phase not in SAMPLING or len(share.apart) < len(share.run.stages)
        },
        times=_times(share),
        reads=dict(step.counts.reads),
        cpu_s=time.process_time() - began,
        notes=share.notes,
    )


@dataclass(frozen=True)
class _Step:
    """What a rehearsed step found besides its peaks."""

    sample_bytes: float
    """On the device, of a sample of the first track, with those that grow from it."""
    trained_bytes: int
    """On the device, of the samples that were trained on."""
    weights: Mapping[str, int]
    """Numbers in the models of each policy that samples."""
    counts: Counts
    """What the step computed and sent."""
    sampling: Mapping[Call, float]
    """Calls of a rollout, in the mean where rollouts differ."""
    parts: Mapping[TrainingPart, Counter[Call]]
    """Calls of training."""


def _step(share: Share, mode: Rehearsal, run_dir: Path) -> _Step:
    """Build, make a rollout to see what samples hold, and then a step: rollout, updates, push, and the next rollout,
    which has the gradients in memory that the updates left."""
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
        names = share.run.all_policies
        bundles: dict[str, Any] = {name: runtime.component(role_name(name, "bundle", names)) for name in names}
        backends = _backends(share.run, runtime)
        for bundle in bundles.values():
            _label_models(mode, bundle)
        reward: Any = runtime.component("reward")  # Any: a service of `DrawnScorer`s
        for scorer in reward.scorers.values():
            mode.ledger.label((each for module in scorer.modules() for each in _weights(module)), REWARD_MODELS)
        _label(mode, backends)
        mode.enter_phase("prepare")
        trainer = make_trainer(share.run, runtime, run_dir, [], threading.Event(), clock)
        trainer.prepare()
        _label(mode, backends)
        clock.observer = observed
        modules = [module for bundle in bundles.values() for module in bundle.trainable_modules().values()]
        pipelines = _pipelines(share.run, runtime)
        turns = {stage.policy: stage.turns for stage in share.run.stages if stage.turns is not None}
        everything = [module for bundle in bundles.values() for module in _all_modules(bundle)]
        everything += [module for scorer in reward.scorers.values() for module in scorer.modules()]
        repeats = Repeats(mode)
        blocks = Blocks(repeats)
        with (
            repeats.active(modules, _algorithms(share.run, runtime)),
            longest_texts(pipelines, turns, repeats, share.answer_tokens),
            _noted_updates(backends, repeats),
            blocks.active(everything),
            steps_alike(mode, blocks),
        ):
            first = trainer.collector.collect(0).resp
            sample_bytes = _labelled(mode, first) / first.meta.batch_size
            first.release()
            mode.counts = Counts()
            if (evaluator := make_evaluator(share.run)) is not None:
                with clock.phase("eval"):
                    evaluator.run(runtime, share.run.scored_track, num_records=0, num_videos=0)
            rollout = trainer.collector.collect(1).resp
            rows = min(share.root.num_trained or 1, rollout.meta.batch_size)
            chosen = runtime.gather([(rollout, range(rows))])
            rollout.release()
            chosen.map(_shortened, {track: work.num_trained for track, work in share.works.items()})
            chosen.refresh()
            trained_bytes = _labelled(mode, chosen)
            with clock.phase("train"):
                _label(mode, backends)  # what has come back to the device for this phase
                runtime.role("stack", StackRole).train(chosen, progress=0.0)
            chosen.release()
            _label(mode, backends)
            if any(pushed is not None for pushed in share.pushes):
                with observed("push"):
                    for backend, pushed in zip(backends, share.pushes, strict=True):
                        if pushed:
                            backend.weight_source.adapter_weights(None)
                        elif pushed is not None:
                            for _ in backend.weight_source.weights():
                                pass
            counts, mode.counts = mode.counts, Counts()
            trainer.collector.collect(2).resp.release()
            sampling: Mapping[Call, float] = counts.operators.get("rollout", {})
            if share.branching is not None:
                sampling = _mean_rollout(share.branching, trainer.collector, mode)
        weights = {
            name: sum(part.numel() for module in bundle.trainable_modules().values() for part in module.parameters())
            for name, bundle in bundles.items()
        }
    return _Step(sample_bytes, trained_bytes, weights, counts, sampling, repeats.noted)


def _mean_rollout(branching: Branching, collector: Collector[Any], mode: Rehearsal) -> dict[Call, float]:
    """The calls of sampling, in the mean over rollouts; Any: parameters of the modality."""
    found: list[Mapping[Call, float]] = []
    for number in (branching.earliest, branching.latest):
        mode.counts = Counts()
        collector.collect(number).resp.release()
        found.append(mode.counts.operators["rollout"])
    low, high = found
    return summed([(low, 1 - branching.share), (high, branching.share)])


@contextmanager
def _noted_updates(backends: Sequence[FSDPBackend], repeats: Repeats) -> Generator[None]:
    """Within it the optimizer's steps count as a part of training."""
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(
                replaced(backend, "optimizer_step", repeats.as_part(TrainingPart("optimizer"), backend.optimizer_step))
            )
        yield


def _labelled(mode: Rehearsal, resp: Held) -> int:
    """Name the tensors of a response; returns the bytes that it holds on the device."""
    tensors = [tensor for tensor in _tensors(resp.map(_itself)) if not has_values(tensor.device)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    mode.ledger.label(tensors, SAMPLES)
    return sum(storage.nbytes() for storage in storages.values())


def _shortened(resp: RolloutResp, num_rows: Mapping[str, int]) -> None:
    """Keep the first rows of each track, as many as are trained on, that grow from kept ones. Of a track that is not
    trained on all of these are kept."""
    for name, track in resp.tracks.items():
        rows = list(range(track.batch_size))
        if track.parent_track is not None:
            kept = set(resp.tracks[track.parent_track].sample_ids)
            rows = [row for row in rows if track.group_ids[row] in kept]
        resp.tracks[name] = track.select(rows[: num_rows[name] or None])


def _itself(value: RolloutResp) -> RolloutResp:
    return value


def _backends(run: ComposedRun, runtime: LocalRuntime) -> list[FSDPBackend]:
    """The backends of the policies that train."""
    backends: list[FSDPBackend] = []
    for name in run.policies:
        backend = runtime.component(role_name(name, "backend", run.all_policies))
        if not isinstance(backend, FSDPBackend):
            raise ConfigError(f"{type(backend).__name__} of policy {name} is not rehearsed, only FSDPBackend.")
        backends.append(backend)
    return backends


def _algorithms(run: ComposedRun, runtime: LocalRuntime) -> dict[str, Any]:  # Any: by their roles
    """The algorithms by the track that each trains."""
    found: dict[str, Any] = {}
    for policy in run.policies.values():
        for track in policy.algorithms:
            name = numbered("algorithm", track, policy.algorithms)
            found[track] = runtime.component(role_name(policy.name, name, run.all_policies))
    return found


def _pipelines(run: ComposedRun, runtime: LocalRuntime) -> dict[str, list[Any]]:  # Any: as above
    """The pipelines of all policies, those that only sample too."""
    return {
        policy.name: [
            runtime.component(role_name(policy.name, numbered("pipeline", own, policy.pipelines), run.all_policies))
            for own in policy.pipelines
        ]
        for policy in run.all_policies.values()
    }


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


def _all_modules(bundle: ModelBundle) -> Iterator[nn.Module]:
    """What trains, and what a diffusers bundle has besides."""
    yield from bundle.trainable_modules().values()
    if isinstance(bundle, DiffusersBundle):
        trained = set(bundle.trainable_modules().values())
        yield from (module for module in bundle.modules.values() if module not in trained)
        yield from bundle.text.encoders.values()


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _label(mode: Rehearsal, backends: Iterable[FSDPBackend]) -> None:
    """Name what training keeps."""
    for backend in backends:
        for name, tensor in backend.state_dict().items():
            mode.ledger.label([local_part(tensor)], OF_STATE.get(name.split("/")[0], COPIES))
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


def _with_others(phase: str, peak: Peak, share: Share, step: _Step) -> Peak:
    """A peak with the samples of this rank that were not in memory then."""
    root = share.root
    if phase == "train":
        others = round(step.sample_bytes * root.num_kept) - step.trained_bytes
    elif phase in ("rollout", "reward"):
        others = round(step.sample_bytes * root.num_samples) - round(step.sample_bytes * root.num_made)
    else:
        return peak
    return Peak(peak.num_bytes + others, {**peak.parts, SAMPLES: peak.parts.get(SAMPLES, 0) + others})


def _operators(step: _Step, share: Share) -> dict[str, dict[Call, float]]:
    """The calls of each phase of a step, for all samples of this rank."""
    times = _times(share)
    counted: dict[str, Mapping[Call, float]] = {**step.counts.operators, "rollout": step.sampling}
    found = {phase: summed([(calls, times.get(phase, 1.0))]) for phase, calls in counted.items()}
    # Copies of the policy before the updates, which belong to no track, are scaled as the first one that trains.
    rest = summed([(counted.get("train", {}), 1.0), *((part, -1.0) for part in step.parts.values())])
    tracks = _times_of_tracks(share)
    parts = [
        (calls, share.updates if part.track is None else tracks[part.track] * _fraction(part, step, share))
        for part, calls in step.parts.items()
    ]
    return {**found, "train": summed([*parts, (rest, times["train"])])}


def _fraction(part: TrainingPart, step: _Step, share: Share) -> float:
    """That of `Work.fractions`; 1 for a track that the first update leaves out (`stack.losses.<track>.every`)."""
    is_usual = TrainingPart("first update", part.track) in step.parts
    return share.works[str(part.track)].fractions.get(part.kind, 1.0) if is_usual else 1.0


def _times(share: Share) -> dict[str, float]:
    samples = share.root.num_samples / share.root.num_made
    found = {"rollout": samples, "reward": samples, "train": next(iter(_times_of_tracks(share).values()), 1.0)}
    return found | ({"eval": 1 / share.evaluated} if share.evaluated else {})


def _times_of_tracks(share: Share) -> dict[str, float]:
    return {
        track: work.mean_depth * (work.num_kept + work.num_replayed) / work.num_trained
        for track, work in share.works.items()
        if work.num_trained
    }
