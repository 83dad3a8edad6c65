"""One optimizer step: the losses of a mini-batch, backward, clipping, and what was measured.

The loss is the sum over tracks of weight times the exact mean over all terms of the track on all devices. Where a
mini-batch comes in parts, the number of terms is known only with the last one: the mean is taken over what the first
part lets expect, and gradients are corrected by one factor in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, StageAlgorithm
from unirl.train.gradient_balance import GradientBalance
from unirl.train.names import below
from unirl.train.shards import local_part
from unirl.train.track_loss import TrackLoss
from unirl.types.devices import wide_float
from unirl.types.errors import ContractError
from unirl.types.protocols.training import TrainBackend


@dataclass(frozen=True)
class TrackPart:
    """One track with its algorithm. `prefix`: of its metrics and its state."""

    name: str
    prefix: str
    algorithm: StageAlgorithm
    loss: TrackLoss


class Update:
    """Gradients of one mini-batch, given at once or in `num_parts` parts, and the step. Every rank makes the same
    calls; collectives inside.

    parts: tracks that take part. measures_balance: report how the tracks' gradients compare.
    num_terms: loss terms of this rank so far.
    """

    def __init__(
        self, backend: TrainBackend, parts: Sequence[TrackPart], *, measures_balance: bool = False, num_parts: int = 1
    ) -> None:
        if num_parts > 1 and len(parts) > 1:
            raise ContractError(f"an update in {num_parts} parts has one track, not {[part.name for part in parts]}")
        self._backend = backend
        self._parts = parts
        self._num_parts = num_parts
        self._balance = GradientBalance(backend) if measures_balance else None
        self._record = RowMetrics()
        self._added = 0
        self._expected: list[float] = []
        """Terms of each track on all devices, as the first part lets expect."""
        self._counted = [0.0] * len(parts)
        self._num_samples = [0] * len(parts)
        self.num_terms = 0
        backend.zero_grad()

    @property
    def is_whole(self) -> bool:
        """True once all parts were added."""
        return self._added == self._num_parts

    def note(self, measured: RowMetrics) -> None:
        """Report more of this update, under names with their track's prefix."""
        self._record.merge(measured)

    def add(self, micros_of: Mapping[str, Sequence[MicroBatch]]) -> None:
        """Backward of micro-batches by track. Raises ContractError for more parts than announced."""
        if self.is_whole:
            raise ContractError(f"an update of {self._num_parts} parts got another one")
        self._added += 1
        backend = self._backend
        num_terms = [[part.algorithm.num_terms(micro.track) for micro in micros_of[part.name]] for part in self._parts]
        counted = torch.tensor(
            [float(sum(own)) for own in num_terms], dtype=wide_float(backend.device), device=backend.device
        )
        self.num_terms += sum(map(sum, num_terms))
        totals = backend.collectives.all_reduce_sum(counted, "dp").tolist()
        self._counted = [before + own for before, own in zip(self._counted, totals, strict=True)]
        # Without any term (every token masked) the sum is 0 whatever it is divided by.
        self._expected = self._expected or [max(own * self._num_parts, 1.0) for own in totals]
        for place, (part, own_terms) in enumerate(zip(self._parts, num_terms, strict=True)):
            micros = micros_of[part.name]
            # Gradients are averaged over the shards, so the sum over all terms needs dp_size on top of 1 / total.
            scale = part.loss.weight * (backend.dp_size / self._expected[place])
            sums_gradients = self.is_whole and (self._balance is not None or part is self._parts[-1])
            measured = self._backward(part, micros, own_terms, scale, sums_gradients=sums_gradients)
            self._record.merge(measured.renamed(part.prefix))
            self._num_samples[place] += sum(micro.track.batch_size for micro in micros) * backend.dp_size
            if self._balance is not None:
                self._balance.note(part.name)

    def finish(self, max_grad_norm: float) -> tuple[dict[str, float], set[str]]:
        """The optimizer step; returns metrics, and the names of those that are maxima."""
        if not self.is_whole:
            raise ContractError(f"an update of {self._num_parts} parts got {self._added}")
        self._correct()
        balanced = {} if self._balance is None else self._balance.metrics()
        stats = self._backend.optimizer_step(max_grad_norm)
        metrics, maxima = self._reduced()
        losses = [part.loss.weight * metrics.get(f"{part.prefix}policy/loss", 0.0) for part in self._parts]
        metrics["train/loss"] = sum(losses[1:], start=losses[0])
        metrics["train/grad_norm"] = stats.grad_norm
        metrics.update(balanced)
        metrics.update({f"train/{name}_grad_norm": norm for name, norm in stats.module_grad_norms.items()})
        metrics["train/lr"] = stats.lr
        metrics["train/skipped_steps"] = float(stats.is_skipped)
        for part, num_samples in zip(self._parts, self._num_samples, strict=True):
            _after_update(part, metrics, num_samples)
        return metrics, maxima

    @torch.no_grad()
    def _correct(self) -> None:
        """Divide by the number of terms that there were, where another one was expected."""
        factor = self._expected[0] / max(self._counted[0], 1.0)
        if self._num_parts == 1 or factor == 1.0:
            return
        for parameter in self._backend.parameters.values():
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)

    def _backward(
        self,
        part: TrackPart,
        micros: Sequence[MicroBatch],
        num_terms: Sequence[int],
        scale: float,
        *,
        sums_gradients: bool,
    ) -> RowMetrics:
        """Add the gradient of scale times the sum over a track's terms; returns what the algorithm measured.

        sums_gradients: whether gradients are summed over devices at its end.
        """
        record = RowMetrics()
        for micro, announced in zip(micros, num_terms, strict=True):
            yielded = 0
            for loss_part, ends_micro in with_last_backward(part.algorithm.losses(micro), announced):
                # The last micro-batch is the same on every device, the last term need not be.
                with self._backend.accumulating(sums_gradients and ends_micro and micro is micros[-1]):
                    (loss_part.loss * scale).backward()
                record.merge(loss_part.metrics)
                yielded += loss_part.num_terms
            if yielded != announced:
                raise ContractError(f"the algorithm announced {announced} loss terms and yielded {yielded}")
        return record

    def _reduced(self) -> tuple[dict[str, float], set[str]]:
        """Means and maxima over all devices, and the names of the maxima. Every rank has the same names, so one
        collective of each kind does."""
        backend, record = self._backend, self._record
        wide = wide_float(backend.device)
        names = sorted(record.sums)
        metrics: dict[str, float] = {}
        if names:
            counts = torch.tensor([record.sums[n][1] for n in names], dtype=wide, device=backend.device)
            sums = torch.stack([record.sums[n][0].to(backend.device, wide) for n in names])
            totals = backend.collectives.all_reduce_sum(torch.stack([sums, counts], dim=1), "dp").cpu()
            metrics.update(
                {name: float(totals[i, 0] / totals[i, 1]) for i, name in enumerate(names) if totals[i, 1] > 0}
            )
        names = sorted(record.maxima)
        if names:
            packed = torch.stack([record.maxima[n].to(backend.device, wide) for n in names])
            largest = backend.collectives.all_reduce_max(packed, "dp").cpu()
            metrics.update({name: float(largest[i]) for i, name in enumerate(names) if largest[i] > -math.inf})
        return metrics, set(names)


def _after_update(part: TrackPart, metrics: dict[str, float], num_samples: int) -> None:
    """Let the algorithm change its own metrics, which it sees under plain names."""
    own = below(metrics, part.prefix)
    for name in own:
        del metrics[part.prefix + name]
    part.algorithm.after_update(own, num_samples)
    metrics.update({part.prefix + name: value for name, value in own.items()})


def with_last_backward(parts: Iterable[LossPart], num_terms: int) -> Iterator[tuple[LossPart, bool]]:
    """Loss parts with whether each is the last, known from the announced number of terms.

    Counting terms instead of looking ahead keeps one graph alive at a time.
    """
    seen = 0
    for part in parts:
        seen += part.num_terms
        yield part, seen >= num_terms
