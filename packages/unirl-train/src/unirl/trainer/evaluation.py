"""Held-out evaluation of images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.data.data_source import PromptRow
from unirl.distributed.runtime import Runtime
from unirl.trainer.held_out import (
    EVAL_ROLLOUT_ID,
    BaseEvaluator,
    EvaluationResult,
    HeldOut,
    Scores,
    scored_batches,
    spread_rows,
)
from unirl.trainer.request import build_request
from unirl.trainer.roles import DiffusionEngineRole
from unirl.types.bounds import NonNegative, PositiveInt, bounded
from unirl.types.rollout import RolloutReq
from unirl.types.samples import SampleRecord
from unirl.types.sampling import DiffusionSamplingParams, PostSolver

SCALES = ("guidance_scale", "guidance_scale_2", "distilled_guidance_scale")
"""Strengths of guidance that an evaluation may set itself."""
EVALUATED_SAMPLING = (
    "num_inference_steps",
    "guidance_scale",
    "guidance_scale_2",
    "post_solver",
    "distilled_guidance_scale",
    "negative_prompt",
    "height",
    "width",
    "num_frames",
    "max_sequence_length",
    "autocast_precision",
    "sampler_kwargs",
)
"""Sampling parameters of diffusion that an evaluation sets itself or takes from training."""


@bounded("eval")
@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(HeldOut):
    """Held-out evaluation of images, see `HeldOut`. num_inference_steps and the three scales: None takes training's.
    post_solver: of every step, as `DiffusionSamplingParams.post_solver`."""

    num_inference_steps: PositiveInt | None = None
    guidance_scale: NonNegative | None = None
    guidance_scale_2: NonNegative | None = None
    distilled_guidance_scale: NonNegative | None = None
    post_solver: PostSolver = "euler"

    def settings(self, training: DiffusionSamplingParams) -> dict[str, dict[str, Any]]:  # Any: plain values
        params = self.params(training)
        return {
            "eval": self._without(*EVALUATED_SAMPLING),
            "sampling": {name: getattr(params, name) for name in EVALUATED_SAMPLING},
        }

    def evaluator(self, rows: Sequence[PromptRow], training: DiffusionSamplingParams) -> BaseEvaluator:
        return Evaluator(self, rows, training)

    def params(self, training: DiffusionSamplingParams) -> DiffusionSamplingParams:
        """Deterministic sampling parameters for evaluation: training's geometry, own seed, no noise."""
        return dataclasses.replace(
            training,
            samples_per_prompt=1,
            eta=0.0,
            scheduler=None,
            sde_indices=[],
            init_same_noise=False,
            branch_steps=None,
            branch_factors=None,
            post_solver=self.post_solver,
            post_step_ratio=1.0,
            keep_latents="last",
            seed=self.seed,
            num_inference_steps=self.num_inference_steps or training.num_inference_steps,
            **{name: scale for name in SCALES if (scale := getattr(self, name)) is not None},
        )


class Evaluator(BaseEvaluator):
    """Held-out images."""

    def __init__(
        self,
        config: EvaluationConfig,
        rows: Sequence[PromptRow],
        training: DiffusionSamplingParams,
    ) -> None:
        self.config = config
        self._rows = spread_rows(rows, config.num_samples)
        self._params = config.params(training)

    @property
    def rows(self) -> list[PromptRow]:
        """Every prompt that an evaluation uses."""
        return self._rows

    @property
    def params(self) -> DiffusionSamplingParams:
        """How evaluation samples."""
        return self._params

    @property
    def all_params(self) -> list[DiffusionSamplingParams]:
        """The one way."""
        return [self._params]

    def run(
        self, runtime: Runtime, track: str | None = None, *, num_records: int = 0, num_videos: int = 0
    ) -> EvaluationResult:
        plan = runtime.role("engine", DiffusionEngineRole).plan(self._params)

        def build(rows: list[PromptRow]) -> RolloutReq:
            return build_request(
                rows, self._params, sigmas=plan.sigmas, latent_shape=plan.latent_shape, rollout_id=EVAL_ROLLOUT_ID
            )

        return judged_images(
            self._rows, build, runtime, config=self.config, num_records=num_records, num_videos=num_videos, track=track
        )


def judged_images(
    rows: Sequence[PromptRow],
    build: Callable[[list[PromptRow]], RolloutReq],
    runtime: Runtime,
    *,
    config: HeldOut,
    num_records: int = 0,
    num_videos: int = 0,
    track: str | None = None,
) -> EvaluationResult:
    """Generate and score one image of every row, and record those of the first. See `scored_batches`."""
    scores = Scores()
    records: list[SampleRecord] = []
    num_rows = 0
    for batch in scored_batches(rows, build, runtime, config=config, track=track):
        scores.add_samples(batch)
        if num_rows < num_records:
            records += batch.records(num_records - num_rows, max(0, num_videos - num_rows))
        num_rows += len(batch.rows)
    return EvaluationResult(
        categories=scores.categories(),
        overall=scores.overall(),
        num_samples=scores.num_scored,
        num_failed=len(scores.errors),
        records=records,
    )
