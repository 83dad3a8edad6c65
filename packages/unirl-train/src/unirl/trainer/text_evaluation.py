"""Held-out evaluation of texts: greedy, and how often one of k samples is right."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from unirl.data.data_source import PromptRow
from unirl.distributed.runtime import Runtime
from unirl.trainer.held_out import (
    EVAL_ROLLOUT_ID,
    BaseEvaluator,
    EvaluationResult,
    HeldOut,
    ScoredBatch,
    Scores,
    scored_batches,
    spread_rows,
)
from unirl.trainer.request import build_text_request
from unirl.trainer.samples import scores_of
from unirl.types.bounds import Bounds, NonNegative, PositiveFraction, PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.samples import SampleRecord
from unirl.types.sampling import ARSamplingParams

PASS_ROLLOUT_ID = EVAL_ROLLOUT_ID - 1
"""Part of every draw's key, so the samples of pass@k are none of training's."""


@bounded("eval")
@dataclass(frozen=True, kw_only=True)
class TextEvaluationConfig(HeldOut):
    """Greedy completions of `num_samples` prompts, and where `pass_at` names some k, sampled ones; see `HeldOut`.

    max_new_tokens: None takes that of training.
    pass_at: values of k. pass_samples: completions a prompt, at least the largest k. pass_prompts: prompts sampled.
    pass_metric: what says that a completion is right, the reward or a component, when it reaches `pass_threshold`.
    temperature, top_p: of these samples; a temperature of None takes that of training.
    """

    max_new_tokens: PositiveInt | None = None
    pass_at: Sequence[int] = ()
    pass_samples: PositiveInt = 8
    pass_prompts: PositiveInt = 64
    pass_metric: str = "reward"
    pass_threshold: Annotated[float, Bounds()] = 1.0
    temperature: NonNegative | None = None
    top_p: PositiveFraction = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [k for k in self.pass_at if not 1 <= k <= self.pass_samples]
        if wrong:
            raise ConfigError(f"eval.pass_at {wrong} must lie in 1 .. eval.pass_samples = {self.pass_samples}")

    @property
    def columns(self) -> list[str]:
        """See `unirl.trainer.held_out.Evaluates.columns`: pass@k."""
        return [pass_name(k) for k in self.pass_at]

    def settings(self, training: ARSamplingParams) -> dict[str, dict[str, Any]]:  # Any: plain values
        return {
            "eval": self._without("max_new_tokens", "temperature", "top_p"),
            "sampling": {
                "greedy": dataclasses.asdict(self.greedy(training)),
                "sampled": dataclasses.asdict(self.sampled(training)) if self.pass_at else None,
            },
        }

    def greedy(self, training: ARSamplingParams) -> ARSamplingParams:
        """The most probable token each time."""
        return dataclasses.replace(
            training,
            samples_per_prompt=1,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens or training.max_new_tokens,
        )

    def sampled(self, training: ARSamplingParams) -> ARSamplingParams:
        """The draws of pass@k."""
        return dataclasses.replace(
            self.greedy(training),
            samples_per_prompt=self.pass_samples,
            temperature=training.temperature if self.temperature is None else self.temperature,
            top_p=self.top_p,
        )

    def evaluator(self, rows: Sequence[PromptRow], training: ARSamplingParams) -> TextEvaluator:
        return TextEvaluator(self, rows, training)


class TextEvaluator(BaseEvaluator):
    """Held-out texts."""

    def __init__(
        self,
        config: TextEvaluationConfig,
        rows: Sequence[PromptRow],
        training: ARSamplingParams,
    ) -> None:
        self.config = self._options = config
        self._rows = spread_rows(rows, config.num_samples)
        self._pass_rows = spread_rows(rows, min(config.pass_prompts, len(rows))) if config.pass_at else []
        self._greedy = config.greedy(training)
        self._sampled = config.sampled(training)

    @property
    def rows(self) -> list[PromptRow]:
        """Every prompt that an evaluation uses."""
        return [*self._rows, *self._pass_rows]

    @property
    def all_params(self) -> list[ARSamplingParams]:
        """Greedy, and where pass@k is asked for, sampled."""
        return [self._greedy, self._sampled] if self._pass_rows else [self._greedy]

    def run(
        self, runtime: Runtime, track: str | None = None, *, num_records: int = 0, num_videos: int = 0
    ) -> EvaluationResult:
        """See `BaseEvaluator.run`. Means are of the greedy completions, `pass@k` of the sampled ones."""
        scores, num_rows = Scores(), 0
        records: list[SampleRecord] = []

        def greedy(rows: list[PromptRow]) -> RolloutReq:
            return build_text_request(rows, self._greedy, rollout_id=EVAL_ROLLOUT_ID)

        def sampled(rows: list[PromptRow]) -> RolloutReq:
            return build_text_request(rows, self._sampled, rollout_id=PASS_ROLLOUT_ID)

        for batch in scored_batches(self._rows, greedy, runtime, config=self.config, track=track):
            scores.add_samples(batch)
            if num_rows < num_records:
                records += batch.records(num_records - num_rows, max(0, num_videos - num_rows))
            num_rows += len(batch.rows)
        for batch in scored_batches(
            self._pass_rows,
            sampled,
            runtime,
            config=self.config,
            samples_per_prompt=self._options.pass_samples,
            track=track,
        ):
            self._add_passes(scores, batch)
        return EvaluationResult(
            categories=scores.categories(),
            overall=scores.overall(),
            num_samples=scores.num_scored,
            num_failed=len(scores.errors),
            records=records,
        )

    def _add_passes(self, scores: Scores, batch: ScoredBatch) -> None:
        """pass@k of every prompt of a batch; one without a score for each sample counts as failed."""
        size = self._options.pass_samples
        for number, row in enumerate(batch.rows):
            samples = range(number * size, (number + 1) * size)
            failed = [error for i in samples if (error := batch.track.reward_errors[i]) is not None]
            if failed:
                scores.errors.append(failed[0])
                continue
            num_right = sum(self._is_right(batch.track, i) for i in samples)
            scores.add(row, {pass_name(k): pass_at(k, num_right, size) for k in self._options.pass_at})

    def _is_right(self, track: RolloutTrack, sample: int) -> bool:
        values = scores_of(track, sample)
        if self._options.pass_metric not in values:
            raise ConfigError(
                f"eval.pass_metric = {self._options.pass_metric} is not among the scores {', '.join(values)}. "
                "Name one of those."
            )
        return values[self._options.pass_metric] >= self._options.pass_threshold


def pass_name(k: int) -> str:
    """The metric's name."""
    return f"pass@{k}"


def pass_at(k: int, num_right: int, num_samples: int) -> float:
    """Probability that at least one of k samples is right, without bias from n of which c are: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021 (arXiv 2107.03374), eq. 1.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
