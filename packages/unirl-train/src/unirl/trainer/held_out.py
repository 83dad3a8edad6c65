"""Sampling and scoring of held-out evaluations: the same prompts, noise and solver each time, so that only the weights
differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from unirl.data.data_source import PromptRow, epoch_order
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.trainer.roles import EngineRole, RewardRole
from unirl.trainer.samples import scores_of, take
from unirl.types.copies import Copies
from unirl.types.errors import RewardError
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.samples import SampleRecord

EVAL_ROLLOUT_ID = -1
"""Part of every noise id, so evaluation noise never equals training noise."""


@dataclass(frozen=True)
class EvaluationResult:
    """Means of the reward and its components, overall and by category, and records of some samples."""

    overall: dict[str, float]
    categories: dict[str, dict[str, float]]
    num_samples: int
    """Number of scored samples."""
    num_failed: int = 0
    """Samples without a score (reward.on_failure: drop_group), left out of the means."""
    records: list[SampleRecord] = field(default_factory=list)
    """Records of some samples, one per prompt and track."""

    def metrics(self) -> dict[str, float]:
        """Flat names: eval/<component>, eval/<category>/<component>, and eval/failed_samples if there are any."""
        flat = {f"eval/{name}": value for name, value in self.overall.items()}
        if self.num_failed:
            flat["eval/failed_samples"] = float(self.num_failed)
        for category, values in self.categories.items():
            flat.update({f"eval/{category}/{name}": value for name, value in values.items()})
        return flat

    def record(self) -> dict[str, object]:
        """The part that the run's summary keeps."""
        return {"overall": self.overall, "categories": self.categories, "num_samples": self.num_samples}


def spread_rows(rows: Sequence[PromptRow], num_samples: int) -> list[PromptRow]:
    """`num_samples` rows that cycle through the prompts; every repetition gets different noise.

    Categories alternate and prompts are in a fixed shuffled order, so a prefix of the list is varied.
    """
    by_category: dict[str, list[PromptRow]] = {}
    for row in rows:
        by_category.setdefault(category_of(row), []).append(row)
    ordered: list[PromptRow] = []
    queues = list(by_category.values())
    position = 0
    while len(ordered) < num_samples:
        queue = queues[position % len(queues)]
        turn, index = divmod(position // len(queues), len(queue))
        row = queue[epoch_order(len(queue), 0, turn)[index]]
        ordered.append(dataclasses.replace(row, prompt_id=f"{row.prompt_id}@{turn}"))
        position += 1
    return ordered


def category_of(row: PromptRow) -> str:
    """The row's category, "all" if its metadata has none."""
    return str((row.metadata or {}).get("category", "all"))


@dataclass(frozen=True)
class ScoredBatch:
    """Some evaluation samples with their scores."""

    rows: list[PromptRow]
    """One row per prompt, without the padding that fills the batch up for the devices."""
    resp: Held
    track: RolloutTrack
    """The root track with rewards, `samples_per_prompt` samples per row in order; without media."""

    def records(self, most: int, num_videos: int) -> list[SampleRecord]:
        """Records of the first sample of every track for the first `most` rows; the first `num_videos` have whole
        videos."""
        roots = self.track.sample_ids[: min(most, len(self.rows))]
        taken = take(self.resp, roots, whole=roots[:num_videos])
        return [next(own) for records in taken.values() for _, own in groupby(records, key=lambda each: each.track)]


def scored_batches(
    rows: Sequence[PromptRow],
    build: Callable[[list[PromptRow]], RolloutReq],
    runtime: Runtime,
    *,
    batch_size: int,
    policy: Copies,
    samples_per_prompt: int,
    track: str | None,
    engine: str = "engine",
) -> Iterator[ScoredBatch]:
    """Generate and score all rows, `batch_size` samples at a time. A batch is released when the next begins.

    track: the track to score; None is the root. If another track is scored, the root gets its rewards too.
    engine: role of what generates.
    """
    generating, reward = runtime.role(engine, EngineRole), runtime.role("reward", RewardRole)
    step = max(1, batch_size // samples_per_prompt)
    for start in range(0, len(rows), step):
        part = list(rows[start : start + step])
        padded = list(part)
        while (len(padded) * samples_per_prompt) % runtime.num_shards:
            padded.append(part[0])
        req = build(padded)
        with generating.generate(req, policy=policy) as resp:
            name = track or resp.meta.root_name()
            reward.score_track(resp, name, is_training=False)
            resp.refresh()
            yield ScoredBatch(part, resp, resp.meta.root_track())


class Scores:
    """Means of named values, overall and by category."""

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, list[float]]] = {}
        self.errors: list[str | None] = []
        """One error per sample without a score."""
        self.num_scored = 0

    def add(self, row: PromptRow, values: Mapping[str, float]) -> None:
        """Add the values of one row, for one sample or aggregated over its samples."""
        own = self._totals.setdefault(category_of(row), {})
        for name, value in values.items():
            own.setdefault(name, []).append(value)

    def add_samples(self, batch: ScoredBatch) -> None:
        """Add the reward and each component of a batch with one sample per row."""
        errors = batch.track.reward_errors
        for i, row in enumerate(batch.rows):
            if errors[i] is None:
                self.num_scored += 1
                self.add(row, scores_of(batch.track, i))
            else:
                self.errors.append(errors[i])

    def categories(self) -> dict[str, dict[str, float]]:
        """Means by category and name. Raises RewardError if nothing was scored."""
        if not self._totals:
            first = self.errors[0] if self.errors else None
            raise RewardError(f"none of {len(self.errors)} evaluation samples could be scored; first error: {first}")
        return {
            category: {name: sum(values) / len(values) for name, values in columns.items()}
            for category, columns in sorted(self._totals.items())
        }

    def overall(self) -> dict[str, float]:
        """Means by name over all categories."""
        names = {name: None for columns in self._totals.values() for name in columns}
        pooled = {name: [v for columns in self._totals.values() for v in columns.get(name, [])] for name in names}
        return {name: sum(values) / len(values) for name, values in pooled.items()}
