"""What an algorithm is to the training stack: it yields losses and says what it needs. The stack owns backward.

Legend: B samples of a micro-batch, S stochastic steps, R rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from unirl.algorithms.losses import MAX_LOG_RATIO, bounded_ratio
from unirl.algorithms.traces import Traces
from unirl.types.devices import widened
from unirl.types.errors import ContractError
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import ActionSamplingParams, ARSamplingParams, DiffusionSamplingParams
from unirl.types.segments import LatentSegment


@dataclass
class RowMetrics:
    """Metrics summed over rows, so that means over ragged micro-batches and devices are exact.

    Values stay on the device that computed them until they are read, so that no GPU waits between two backwards.
    """

    sums: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def mean(self, name: str, values: Tensor) -> None:
        """Report the mean of `values` over all rows of the update."""
        self.add(name, widened(values.detach()).sum(), values.numel())

    def add(self, name: str, total: Tensor, count: int) -> None:
        """Report sum of `total` over sum of `count` of all calls."""
        self._include(name, widened(total.detach()), count)

    def _include(self, name: str, total: Tensor, count: int) -> None:
        if name in self.sums:
            so_far, counted = self.sums[name]
            total, count = so_far + total, counted + count
        self.sums[name] = (total, count)

    def max(self, name: str, values: Tensor) -> None:
        """Report the largest of `values` over all rows of the update; nothing where there are none."""
        wide = widened(values.detach())
        largest = wide.max() if values.numel() else torch.tensor(-math.inf, dtype=wide.dtype)
        self.maxima[name] = torch.maximum(self.maxima[name], largest) if name in self.maxima else largest

    def renamed(self, prefix: str) -> RowMetrics:
        """The record with `prefix` before every name."""
        if not prefix:
            return self
        return RowMetrics(
            {prefix + name: value for name, value in self.sums.items()},
            {prefix + name: value for name, value in self.maxima.items()},
        )

    def merge(self, other: RowMetrics) -> None:
        """Add another record to this one."""
        for name, (total, count) in other.sums.items():
            self._include(name, total, count)
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


@dataclass(frozen=True)
class LossPart:
    """One backward's worth of loss: the SUM over its terms, and what it measured."""

    loss: Tensor
    num_terms: int
    metrics: RowMetrics


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a track on their way through one or more backward passes."""

    track: RolloutTrack
    anchor: dict[str, Tensor]
    """Fields frozen before the first update, [B, ...] each or one value per token; empty at the first update, and where
    no anchor is taken."""
    update: int
    """Which optimizer step of this rollout, from 0."""
    progress: float
    """Fraction of the run done, in [0, 1]."""
    policy_version: int | None = None
    """Version of the policy before the first update; None: of the present one."""
    traces: Traces | None = None
    """What notes some samples per token or step; None where none are to be looked at."""

    @property
    def advantages(self) -> Tensor:
        """[B] float32, of the track. Raises ContractError if it has none."""
        if self.track.advantages is None:
            raise ContractError("this track has no advantages")
        return self.track.advantages

    @property
    def segment(self) -> LatentSegment:
        """The latent segment. Raises ContractError for another kind."""
        if not isinstance(self.track.segment, LatentSegment):
            raise ContractError(f"expected a latent segment, the track holds {type(self.track.segment).__name__}")
        return self.track.segment


class StageAlgorithm(ABC):
    """Base of the algorithms. Class attributes say what the stack, the trainer and `check` must provide."""

    recipe_rules: ClassVar[str] = "unirl.algorithms.rules"
    """Module with the rules of recipes, see `unirl.types.recipe`. A subclass that names its own adds to these."""
    requires_sde: ClassVar[bool] = False
    """True if stochastic steps with log-probs are needed."""
    rollout_policy: ClassVar[str | None] = None
    """Named policy that rollouts are sampled from; None is the policy being trained."""
    requires_trajectory: ClassVar[bool] = False
    """True if every latent of the trajectory is needed (sampling.keep_latents: all)."""
    requires_reward_gradient: ClassVar[bool] = False
    """True if the scorers must be differentiable; they come through `use_reward`."""
    learns_value: ClassVar[bool] = False
    """True if it learns what reward to expect, so that advantages must not be centred on their group."""
    requires_centred_advantages: ClassVar[bool] = False
    """True if the advantages of each group must sum to 0."""
    requires_reference: ClassVar[bool] = False
    """True if a reference policy is needed whatever the penalty's weight."""
    trains_tokens: ClassVar[bool] = False
    """True if it trains on generated tokens instead of latents."""
    trains_actions: ClassVar[bool] = False
    """True if it trains on the actions of episodes."""
    requires_weights: ClassVar[bool] = False
    """True if advantages must be weights of at least 0 (`unirl.algorithms.sample_weights`)."""
    takes_media_advantages: ClassVar[bool] = False
    """True if each medium of a sample has its own advantage (`unirl.algorithms.routed_advantages`)."""
    takes_regions: ClassVar[bool] = False
    """True if it can weigh places of a sample by the attention that they got (`LatentSegment.regions`)."""
    teacher_option: ClassVar[str | None] = None
    """Keyword that names the policy it asks, which neither trains nor samples; it comes through `use_teacher`."""
    takes_stale_samples: ClassVar[bool] = False
    """True if samples of older weights need no correction: the objective does not weigh them against the policy that
    made them."""
    is_on_policy: ClassVar[bool] = False
    """True if a rollout serves one update only."""
    samples_per_unit: int = 1
    """Consecutive samples that must stay in one micro-batch (2 for preference pairs)."""
    unit_option: ClassVar[str | None] = None
    """Keyword of the constructor that says `samples_per_unit`; None where the class does."""
    trains_trees: ClassVar[bool] = False
    """True if it trains on samples that share steps (`unirl.types.branching`)."""
    trains_own_steps: ClassVar[bool] = False
    """True if it trains on samples with one stochastic step each (`sampling.one_step`)."""
    trained_rows: ClassVar[str | int | None] = None
    """Rows of the model in the loss of one sample: their number, or the keyword that says it; None: one per stochastic
    step."""
    freezes_fields: ClassVar[bool] = False
    """True if `anchor` takes more than log-probs of tokens from a replay before the first update."""
    trains_copies: ClassVar[bool] = False
    """True if `before_update` trains, which needs the samples of the whole update at once."""
    uses_anchor: bool = False
    """True if updates after the first need `anchor`. The first takes what it needs from its own forward."""

    def use_reward(self, reward: object) -> None:  # noqa: B027 (an optional hook)
        """Called once, before `prepare`, with the reward service of this worker."""

    def use_teacher(self, teacher: Any, params: Any) -> None:  # Any: a pipeline and parameters of its kind
        """Called once, before `prepare`, with the pipeline of the policy that `teacher_option` names and the sampling
        parameters of the run. Raises ConfigError for a teacher that this algorithm cannot ask."""
        raise ContractError(f"{type(self).__name__} asks no teacher")

    def prepare(self) -> None:  # noqa: B027 (an optional hook)
        """Called once before training: make the named policies that the algorithm needs."""

    def trust_rollout(self) -> None:  # noqa: B027 (an optional hook)
        """Called once, before `prepare`, where the rollout's log-probs are a replay's up to float32 rounding."""

    @property
    def old_logp(self) -> str | None:
        """Where the log-probs before the first update come from, for people; None where none are needed."""
        return None

    @property
    def starts_at_ratio_one(self) -> bool:
        """True if every ratio of a rollout's first update is exactly 1, where the algorithm has ratios."""
        return True

    def anchor(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Fields of the policy before the first update, for a later update, at exactly the rows it will use."""
        raise ContractError(f"{type(self).__name__} takes no anchor")

    @property
    def judges_update(self) -> bool:
        """True if something is judged over a whole update, by `judged`; the first update has an anchor then too."""
        return False

    def judged(self, micros: Sequence[MicroBatch], gather: Callable[[Tensor], Tensor]) -> list[MicroBatch]:
        """The micro-batches of one update on this rank, with anchors, after a judgement over the update on all ranks.

        gather: a collective that joins values [M] of all shards of the batch; every rank calls it equally often.
        """
        raise ContractError(f"{type(self).__name__} judges no update as a whole")

    def before_update(self, micros: Sequence[MicroBatch]) -> RowMetrics:
        """Called before the losses of an update, with its micro-batches on this rank: train what else the algorithm
        trains on them. Returns what it measured. Every rank calls it; there are no gradients yet."""
        return RowMetrics()

    @abstractmethod
    def num_terms(self, track: RolloutTrack) -> int:
        """Number of loss terms that `losses` will yield for this track in all: the divisor of the mean."""

    @abstractmethod
    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """Losses of one micro-batch, one per backward."""

    def after_update(self, metrics: dict[str, float], num_samples: int) -> None:  # noqa: B027 (an optional hook)
        """Called after every optimizer step with its metrics (for adaptive coefficients)."""

    def after_rollout(self) -> dict[str, float]:
        """Called after the last update of a rollout (old-policy decay). Returns metrics."""
        return {}

    def state_dict(self) -> dict[str, float]:
        """Numbers that a checkpoint must hold."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:  # noqa: B027 (an optional hook)
        """Restore `state_dict`."""


def report_ratio(metrics: RowMetrics, log_ratio_R: Tensor) -> None:
    """The ratio's statistics, under the names that all algorithms share."""
    log_ratio = log_ratio_R.detach()
    ratio = bounded_ratio(log_ratio)
    metrics.mean("policy/ratio_mean", ratio)
    metrics.max("policy/ratio_max_abs_dev", (ratio - 1).abs())
    metrics.mean("policy/ratio_bounded_fraction", log_ratio > MAX_LOG_RATIO)
    metrics.mean("policy/approx_kl", 0.5 * log_ratio.square())


def report_clipped(metrics: RowMetrics, advantage_R: Tensor, limit: float | None) -> None:
    """The fraction of advantages beyond +- limit, under the name that all algorithms share; None clips none."""
    is_clipped = advantage_R.abs() > (math.inf if limit is None else limit)
    metrics.mean("advantage/clipped_fraction", is_clipped.float())


def row_chunks(num_rows: int, rows_per_forward: int | None) -> list[slice]:
    """Consecutive slices of at most `rows_per_forward` rows (None: all at once)."""
    step = rows_per_forward or num_rows
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


ParamsT = TypeVar("ParamsT", DiffusionSamplingParams, ARSamplingParams, ActionSamplingParams)


def sampled_with(params: ParamsT | None, expected: ParamsT | None) -> ParamsT:
    """`params`, which a segment was sampled with. Raises ContractError if they are absent or differ from `expected`
    in anything but the stochastic steps, which change from rollout to rollout."""
    if params is None:
        raise ContractError("the segment does not say how it was sampled; the engine must set its params")
    if expected is not None:
        changes = [
            f"{name}: rollout {getattr(params, name)!r}, replay {getattr(expected, name)!r}"
            for name in vars(expected)
            if name not in ("scheduler", "sde_indices") and getattr(params, name) != getattr(expected, name)
        ]
        if changes:
            raise ContractError("rollout and replay were sampled differently: " + "; ".join(changes))
    return params
