"""The training step of a policy's tracks: anchor, mini-batches, micro-batches, backward, one optimizer step.

The stack owns backward and scaling; the algorithms yield losses. The loss of an update is the sum over its tracks of
weight times the exact mean over all terms of the track's mini-batch on all devices, whatever the sizes of the
micro-batches.

Legend: U updates per rollout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.base import MicroBatch, StageAlgorithm
from unirl.algorithms.traces import Trace, Traces
from unirl.config.schema import DEFAULT_TRACK
from unirl.train.compile_time import CompileClock
from unirl.train.flops import TrainingRate
from unirl.train.names import below
from unirl.train.slicing import training_slices
from unirl.train.track_loss import TrackLoss, track_losses
from unirl.train.update import TrackPart, Update
from unirl.types.bounds import PositiveInt, PositiveOrInf, bounded
from unirl.types.copies import Copies, merged_copies
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.training import TrainBackend
from unirl.types.roles import Axis, Collect, Dispatch, distributed
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment, SizedLatents, TextSegment
from unirl.types.weights import tensor_checksum

FIRST_RATIO = "policy/first_ratio_max_abs_dev"


@dataclass(frozen=True)
class TrainStepResult:
    """What one rollout's training did. `metrics` are means over the updates, and maxima where a metric is one;
    `updates` has one record each."""

    metrics: dict[str, float]
    updates: list[dict[str, float]] = field(default_factory=list)


@bounded("stack")
class TrainStack:
    """Trains the tracks of a response on one backend: the losses of all tracks of an update end in one optimizer step.

    algorithms: track -> algorithm, or one algorithm, whose track is `track` (None: "image").
    losses: track -> weight and cadence, a `TrackLoss` or its keywords; a track that is not named has weight 1 and
        trains in every update. With several tracks metrics are called `<track>/...`, except for those of the optimizer
        step.
    micro_batch_size: samples that a backward holds at once; the memory knob.
    num_updates_per_batch: optimizer steps that a rollout is used for, each on its own samples.
    num_epochs: how often these steps are taken, with the anchor of the policy before the first one throughout.
    max_grad_norm: global L2 norm that gradients are clipped to.
    measures_balance: report the norm of each track's gradient and the cosines between them, see
        `unirl.train.gradient_balance`; a copy of the gradients per track.
    Raises ConfigError for losses of tracks without an algorithm, and an update that trains no track.
    """

    recipe_rules: ClassVar[str] = "unirl.train.stack_rules"

    def __init__(
        self,
        backend: TrainBackend,
        algorithms: StageAlgorithm | Mapping[str, StageAlgorithm],
        *,
        micro_batch_size: PositiveInt,
        num_updates_per_batch: PositiveInt = 1,
        num_epochs: PositiveInt = 1,
        max_grad_norm: PositiveOrInf = 1.0,
        track: str | None = None,
        losses: Mapping[str, TrackLoss | Mapping[str, Any]] | None = None,  # Any: keywords of TrackLoss
        measures_balance: bool = False,
    ) -> None:
        self._backend = backend
        self._micro_batch_size = micro_batch_size
        self._num_epochs = num_epochs
        self._num_updates = num_updates_per_batch * num_epochs
        """Updates of a rollout, all epochs."""
        self._max_grad_norm = max_grad_norm
        self._rate = TrainingRate(backend)
        self._compiling = CompileClock() if backend.is_compiled else None
        self._traces: Traces | None = None
        self._num_updates_done = 0
        """Over all rollouts: what the cadence counts."""
        self._maxima: set[str] = set()
        """Names of the metrics that are maxima instead of means."""
        named = _by_track(algorithms, track)
        if measures_balance and len(named) == 1:
            raise ConfigError(
                f"stack.measures_balance compares the gradients of several tracks; there is one, {next(iter(named))}. "
                "Remove it."
            )
        self._measures_balance = measures_balance
        self._begun: Update | None = None
        """The update whose parts come one after the other."""
        own = track_losses(named, losses or {})
        taking_turns = [name for name, loss in own.items() if loss.every > 1]
        if num_epochs > 1 and taking_turns:
            raise ConfigError(
                f"stack.num_epochs = {num_epochs} repeats the updates of a rollout, in which {taking_turns} take turns "
                "(stack.losses.<track>.every). Set num_epochs: 1, or every: 1."
            )
        self._parts = [
            TrackPart(name, f"{name}/" if len(named) > 1 else "", algorithm, own[name])
            for name, algorithm in named.items()
        ]

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        """Let the algorithms make the named policies they need. Called once, before training or resuming."""
        for part in self._parts:
            part.algorithm.prepare()

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def trained_tracks(self) -> list[str]:
        """Names of the tracks that train, which need advantages."""
        return [part.name for part in self._parts]

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def rollout_policy(self) -> Copies:
        """Named copies of the policy that rollouts must be sampled from, by track where tracks differ; None is the
        policy being trained."""
        return merged_copies({part.name: part.algorithm.rollout_policy for part in self._parts})

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def old_logp(self) -> str | None:
        """Where the log-probs before the first update come from, for people; None where none are needed."""
        if len(self._parts) == 1:
            return self._parts[0].algorithm.old_logp
        said = {part.name: part.algorithm.old_logp for part in self._parts}
        return "; ".join(f"{name}: {words}" for name, words in said.items() if words) or None

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def exact_ratios(self) -> list[str]:
        """Names of the metrics that are 0 where every ratio of a first update is exactly 1."""
        return [f"{part.prefix}{FIRST_RATIO}" for part in self._parts if part.algorithm.starts_at_ratio_one]

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def samples_per_unit(self) -> int:
        """Consecutive samples that must stay together on their way here."""
        return math.lcm(*(part.algorithm.samples_per_unit for part in self._parts))

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def state_dict(self) -> dict[str, float]:
        """The algorithms' own numbers and, of several tracks, the updates done; the same on every rank."""
        state = {
            f"{part.prefix}{name}": value for part in self._parts for name, value in part.algorithm.state_dict().items()
        }
        return state if len(self._parts) == 1 else {**state, "num_updates": self._num_updates_done}

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore `state_dict` on every rank."""
        for part in self._parts:
            part.algorithm.load_state_dict(below(state, part.prefix))
        if len(self._parts) > 1:
            self._num_updates_done = int(state["num_updates"])

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def trace(self, samples: list[str]) -> None:
        """Note these samples per token or denoising step when they train; until `take_traces`."""
        self._traces = Traces(samples)

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def take_traces(self) -> list[Trace]:
        """What was noted on this rank, see `unirl.algorithms.traces`."""
        traces, self._traces = self._traces, None
        return [] if traces is None else traces.take()

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def train(self, resp: RolloutResp, *, progress: float) -> TrainStepResult:
        """Train on one rank's shard of a rollout, whose tracks hold their advantages. Every rank calls it; collectives
        inside.

        Raises ContractError if a track or its advantages are missing, and TrainingError after too many non-finite
        gradients in a row.
        """
        due = [(part, part.loss.updates(self._num_updates_done, self._num_updates)) for part in self._parts]
        taking_part = [(part, updates) for part, updates in due if updates]
        tracks = {part.name: self._track(resp, part.name) for part, _ in taking_part}
        self._require_same_samples(tracks)
        kind = tuple((part.name, len(updates)) for part, updates in taking_part)
        with self._rate.measured(kind) as rate:
            started = time.perf_counter()
            micros: list[dict[str, list[MicroBatch]]] = [{} for _ in range(self._num_updates)]
            for part, updates in taking_part:
                for update, anchored in zip(
                    updates, self._anchored(part, tracks[part.name], updates, progress), strict=True
                ):
                    micros[update][part.name] = anchored
            anchor_s = time.perf_counter() - started
            updates = [self._update(micros_of) for micros_of in micros]
        result = self._result(updates, taking_part)
        result.metrics["timing_s/anchor"] = anchor_s
        result.metrics.update(rate)
        return result

    def _result(
        self, updates: list[dict[str, float]], taking_part: Sequence[tuple[TrackPart, Sequence[int]]]
    ) -> TrainStepResult:
        """What the updates of a rollout did. taking_part: tracks with the numbers of the updates that train them."""
        self._num_updates_done += len(updates)
        metrics = _joined(updates, self._maxima)
        for part, own in taking_part:
            metrics.update({part.prefix + name: value for name, value in part.algorithm.after_rollout().items()})
            name = f"{part.prefix}policy/ratio_max_abs_dev"
            if name in updates[own[0]]:
                metrics[f"{part.prefix}{FIRST_RATIO}"] = updates[own[0]][name]
        metrics["train/skipped_steps"] = sum(u["train/skipped_steps"] for u in updates)
        if self._compiling is not None:
            metrics["timing_s/compile"] = self._compiling.lap()
        return TrainStepResult(metrics, updates)

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def train_part(self, resp: RolloutResp, *, progress: float, num_parts: int) -> TrainStepResult | None:
        """Train on one of the parts that a rollout comes in, one after the other: gradients add up, and the last part
        ends the update, the only one of the rollout. Returns its result then, None before.

        Every rank calls it with a shard of each part; collectives inside. Raises ContractError for a stack of several
        tracks or updates, an algorithm that judges an update as a whole, and advantages that are missing.
        """
        part = self._parts[0]
        needs_whole = part.algorithm.judges_update or part.algorithm.trains_copies
        if len(self._parts) > 1 or self._num_updates > 1 or needs_whole:
            raise ContractError(
                f"a rollout in {num_parts} parts serves one update of one track: there are {self._num_updates} of "
                f"{len(self._parts)}, and the algorithm needs whole updates: {needs_whole}"
            )
        track = self._track(resp, part.name)
        self._require_same_samples({part.name: track})
        [micros] = self._anchored(part, track, [0], progress)
        if self._begun is None:
            self._begun = Update(self._backend, self._parts, num_parts=num_parts)
        self._begun.add({part.name: micros})
        if not self._begun.is_whole:
            return None
        update, self._begun = self._begun, None
        return self._result([self._finished(update)], [(part, [0])])

    def _track(self, resp: RolloutResp, name: str) -> RolloutTrack:
        track = resp.track(name)
        if track.advantages is None:
            raise ContractError(f"track {name} has no advantages: attach them before training")
        return track.to(self._backend.device)

    def _anchored(
        self, part: TrackPart, track: RolloutTrack, updates: Sequence[int], progress: float
    ) -> list[list[MicroBatch]]:
        """Micro-batches for each of `updates`, those after the first update of the rollout with the anchor of the
        policy before it. Collectives inside where an update is judged as a whole."""
        algorithm = part.algorithm
        slices = training_slices(
            track.batch_size,
            len(updates) // self._num_epochs,
            part.loss.micro_batch_size or self._micro_batch_size,
            algorithm.samples_per_unit,
        )
        micros: list[list[MicroBatch]] = []
        for place, update in enumerate(updates):
            own = place % len(slices)
            if place >= len(slices) and (own > 0 or not algorithm.uses_anchor or algorithm.judges_update):
                micros.append([replace(micro, update=update) for micro in micros[own]])
                continue
            micros.append([])
            for rows in slices[own]:
                for same in self._of_one_size(track.select(rows), algorithm.samples_per_unit):
                    micro = MicroBatch(same, {}, update, progress, self._backend.policy_version, self._traces)
                    if algorithm.uses_anchor and (update > 0 or algorithm.judges_update):
                        micro = replace(micro, anchor=algorithm.anchor(micro))
                    micros[-1].append(micro)
            if algorithm.judges_update:
                micros[-1] = algorithm.judged(micros[-1], self._gathered)
        return micros

    def _gathered(self, values_M: Tensor) -> Tensor:
        """Values of all shards of the batch, one shard after the other, with their bits. A collective."""
        backend = self._backend
        if backend.dp_size == 1:
            return values_M
        counts = torch.zeros(backend.dp_size, dtype=torch.long, device=backend.device)
        counts[backend.dp_rank] = values_M.numel()
        ends = backend.collectives.all_reduce_sum(counts, "dp").cumsum(0).tolist()
        joined = values_M.new_zeros(ends[-1])
        end = ends[backend.dp_rank]
        joined[end - values_M.numel() : end] = values_M
        return backend.collectives.all_reduce_sum(joined, "dp")

    def _require_same_samples(self, tracks: Mapping[str, RolloutTrack]) -> None:
        """Raise ContractError, on all of them, if ranks that work on the same samples hold others.

        Their tokens would be mixed. A collective where there are such ranks.
        """
        place = self._backend.mesh_place
        if place.sp_size == place.tp_size == 1:
            return
        axis: Axis = "tp" if place.tp_size > 1 else "sp"
        for name, track in tracks.items():
            for what, tensor in _compared(track.segment):
                digest = float(int(tensor_checksum(tensor)[:8], 16))
                both = torch.tensor([digest, -digest], dtype=torch.float64, device=self._backend.device)
                largest, smallest = self._backend.collectives.all_reduce_max(both, axis).tolist()
                if largest != -smallest:
                    raise ContractError(
                        f"ranks that share samples (topology.{axis} = {max(place.sp_size, place.tp_size)}) hold "
                        f"different {what} of the track {name}. Sample with the trainside engine, or an engine in its "
                        "own pool."
                    )

    def _of_one_size(self, track: RolloutTrack, samples_per_unit: int) -> list[RolloutTrack]:
        """A micro-batch, or where its images differ in size one for each. Raises ContractError if devices would run
        unequally many, or samples that belong together differ."""
        if isinstance(track.segment, SizedLatents) and track.batch_size > 1 and self._backend.dp_size > 1:
            raise ContractError(
                f"a micro-batch of {track.batch_size} images that choose their size is as many forwards as there are "
                f"sizes, and {self._backend.dp_size} devices must run equally many. Set stack.micro_batch_size: 1."
            )
        parts = track.by_size()
        torn = [rows for rows, _ in parts if len(rows) % samples_per_unit]
        if torn:
            raise ContractError(f"images of one unit of {samples_per_unit} samples have different sizes")
        return [part for _, part in parts]

    def _update(self, micros_of: Mapping[str, list[MicroBatch]]) -> dict[str, float]:
        parts = [part for part in self._parts if part.name in micros_of]
        before = [part.algorithm.before_update(micros_of[part.name]).renamed(part.prefix) for part in parts]
        update = Update(self._backend, parts, measures_balance=self._measures_balance)
        for measured in before:
            update.note(measured)
        update.add(micros_of)
        self._rate.num_terms += update.num_terms
        return self._finished(update)

    def _finished(self, update: Update) -> dict[str, float]:
        metrics, maxima = update.finish(self._max_grad_norm)
        self._maxima |= maxima
        return metrics


def _compared(segment: object) -> Iterator[tuple[str, Tensor]]:
    """What ranks that share samples must have alike, by name."""
    if isinstance(segment, LatentSegment):
        yield "latents", segment.latents
    if isinstance(segment, TextSegment):
        yield "tokens", segment.tokens
        if segment.log_probs is not None:
            yield "log-probs", segment.log_probs


def _by_track(
    algorithms: StageAlgorithm | Mapping[str, StageAlgorithm], track: str | None
) -> dict[str, StageAlgorithm]:
    if isinstance(algorithms, StageAlgorithm):
        return {DEFAULT_TRACK if track is None else track: algorithms}
    if track is not None:
        raise ConfigError(f"stack.track = {track} names the track of a single algorithm; there are {list(algorithms)}")
    if not algorithms:
        raise ConfigError("a training stack needs an algorithm for at least one track")
    return dict(algorithms)


def _joined(updates: Sequence[Mapping[str, float]], maxima: Set[str]) -> dict[str, float]:
    """Each metric's mean, or the largest of those in `maxima`, over the updates that measured it (one without a trained
    token measures little)."""
    names = dict.fromkeys(name for update in updates for name in update)
    found = {name: [update[name] for update in updates if name in update] for name in names}
    return {name: max(values) if name in maxima else sum(values) / len(values) for name, values in found.items()}
