"""The training step of one track: anchor, mini-batches, micro-batches, backward, optimizer step.

The stack owns backward and scaling; the algorithm yields losses. The loss of an update is the exact mean over all
terms of the mini-batch on all devices, whatever the sizes of the micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, StageAlgorithm
from unirl.train.slicing import training_slices
from unirl.types.bounds import PositiveInt, PositiveOrInf, bounded
from unirl.types.errors import ContractError
from unirl.types.protocols import TrainBackend
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutResp, RolloutTrack


@dataclass(frozen=True)
class TrainStepResult:
    """What one rollout's training did. `metrics` are means over the updates, and maxima where a metric is one;
    `updates` has one record each."""

    metrics: dict[str, float]
    updates: list[dict[str, float]] = field(default_factory=list)


@bounded("stack")
class TrainStack:
    """Trains one track of a response.

    micro_batch_size: samples that a backward holds at once; the memory knob.
    num_updates_per_batch: optimizer steps that a rollout is used for, each on its own samples.
    max_grad_norm: global L2 norm that gradients are clipped to.
    """

    def __init__(
        self,
        backend: TrainBackend,
        algorithm: StageAlgorithm,
        *,
        micro_batch_size: PositiveInt,
        num_updates_per_batch: PositiveInt = 1,
        max_grad_norm: PositiveOrInf = 1.0,
        track: str = "image",
    ) -> None:
        self._backend = backend
        self._algorithm = algorithm
        self._micro_batch_size = micro_batch_size
        self._num_updates = num_updates_per_batch
        self._max_grad_norm = max_grad_norm
        self._track = track
        self._maxima: set[str] = set()
        """Names of the metrics that are maxima instead of means."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        """Let the algorithm make the named policies it needs. Called once, before training or resuming."""
        self._algorithm.prepare()

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def rollout_policy(self) -> str | None:
        """Named policy that rollouts must be sampled from; None is the policy being trained."""
        return self._algorithm.rollout_policy

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def old_logp(self) -> str | None:
        """Where the log-probs before the first update come from, for people; None where none are needed."""
        return self._algorithm.old_logp

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def samples_per_unit(self) -> int:
        """Consecutive samples that must stay together on their way here."""
        return self._algorithm.samples_per_unit

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def state_dict(self) -> dict[str, float]:
        """The algorithm's own numbers, the same on every rank."""
        return self._algorithm.state_dict()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore `state_dict` on every rank."""
        self._algorithm.load_state_dict(state)

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def train(self, resp: RolloutResp, *, progress: float) -> TrainStepResult:
        """Train on one rank's shard of a rollout, whose track holds its advantages. Every rank calls it; collectives
        inside.

        Raises ContractError where there are no advantages, and TrainingError after too many non-finite gradients in a
        row.
        """
        track = resp.track(self._track)
        if track.advantages is None:
            raise ContractError(f"track {self._track} has no advantages: attach them before training")
        track = track.to(self._backend.device)
        slices = training_slices(
            track.batch_size, self._num_updates, self._micro_batch_size, self._algorithm.samples_per_unit
        )
        started = time.perf_counter()
        micros = self._anchored(track, slices, progress)
        anchor_s = time.perf_counter() - started
        updates = [self._update(micro_list) for micro_list in micros]
        after = self._algorithm.after_rollout()
        metrics = _joined(updates, self._maxima)
        metrics.update(after)
        if "policy/ratio_max_abs_dev" in updates[0]:
            metrics["policy/first_ratio_max_abs_dev"] = updates[0]["policy/ratio_max_abs_dev"]
        metrics["train/skipped_steps"] = sum(u["train/skipped_steps"] for u in updates)
        metrics["timing_s/anchor"] = anchor_s
        return TrainStepResult(metrics, updates)

    def _anchored(self, track: RolloutTrack, slices: list[list[list[int]]], progress: float) -> list[list[MicroBatch]]:
        """Micro-batches by update, those after the first with the anchor of the policy before it."""
        micros: list[list[MicroBatch]] = []
        for update, micro_list in enumerate(slices):
            micros.append([])
            for rows in micro_list:
                micro = MicroBatch(track=track.select(rows), anchor={}, update=update, progress=progress)
                if self._algorithm.uses_anchor and update > 0:
                    micro = replace(micro, anchor=self._algorithm.anchor(micro))
                micros[-1].append(micro)
        return micros

    def _update(self, micros: list[MicroBatch]) -> dict[str, float]:
        backend = self._backend
        backend.zero_grad()
        own_terms = [self._algorithm.num_terms(micro.track) for micro in micros]
        counted = torch.tensor([float(sum(own_terms))], dtype=torch.float64, device=backend.device)
        # Gradients are averaged over devices, so the sum over all terms needs dp_size on top of 1 / total. Without any
        # term (every token masked) the sum is 0 whatever it is divided by.
        scale = backend.dp_size / max(float(backend.all_reduce_sum(counted)), 1.0)
        record = RowMetrics()
        for micro, num_terms in zip(micros, own_terms, strict=True):
            yielded = 0
            for part, ends_micro in with_last_backward(self._algorithm.losses(micro), num_terms):
                # The last micro-batch is the same on every device, the last term need not be.
                with backend.accumulating(ends_micro and micro is micros[-1]):
                    (part.loss * scale).backward()
                record.merge(part.metrics)
                yielded += part.num_terms
            if yielded != num_terms:
                raise ContractError(f"the algorithm announced {num_terms} loss terms and yielded {yielded}")
        stats = backend.optimizer_step(self._max_grad_norm)
        metrics = self._reduced(record)
        metrics["train/loss"] = metrics.get("policy/loss", 0.0)
        metrics["train/grad_norm"] = stats.grad_norm
        metrics.update({f"train/{name}_grad_norm": norm for name, norm in stats.module_grad_norms.items()})
        metrics["train/lr"] = stats.lr
        metrics["train/skipped_steps"] = float(stats.is_skipped)
        num_samples = sum(micro.track.batch_size for micro in micros) * backend.dp_size
        self._algorithm.after_update(metrics, num_samples)
        return metrics

    def _reduced(self, record: RowMetrics) -> dict[str, float]:
        """Means and maxima over all devices. Every rank has the same names, so one collective of each kind does."""
        backend = self._backend
        names = sorted(record.sums)
        metrics: dict[str, float] = {}
        if names:
            pairs = [[float(total), float(count)] for total, count in (record.sums[n] for n in names)]
            packed = torch.tensor(pairs, dtype=torch.float64, device=backend.device)
            totals = backend.all_reduce_sum(packed).cpu()
            metrics.update(
                {name: float(totals[i, 0] / totals[i, 1]) for i, name in enumerate(names) if totals[i, 1] > 0}
            )
        names = sorted(record.maxima)
        self._maxima.update(names)
        if names:
            packed = torch.stack([record.maxima[n] for n in names]).to(backend.device)
            largest = backend.all_reduce_max(packed).cpu()
            metrics.update({name: float(largest[i]) for i, name in enumerate(names) if largest[i] > -math.inf})
        return metrics


def _joined(updates: Sequence[Mapping[str, float]], maxima: Set[str]) -> dict[str, float]:
    """Each metric's mean, or the largest of those in `maxima`, over the updates that measured it (one without a trained
    token measures little)."""
    names = dict.fromkeys(name for update in updates for name in update)
    found = {name: [update[name] for update in updates if name in update] for name in names}
    return {name: max(values) if name in maxima else sum(values) / len(values) for name, values in found.items()}


def with_last_backward(parts: Iterable[LossPart], num_terms: int) -> Iterator[tuple[LossPart, bool]]:
    """Loss parts with whether each is the last, known from the announced number of terms.

    Counting terms instead of looking ahead keeps one graph alive at a time.
    """
    seen = 0
    for part in parts:
        seen += part.num_terms
        yield part, seen >= num_terms
