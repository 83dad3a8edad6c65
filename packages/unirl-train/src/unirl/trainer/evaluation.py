"""Held-out evaluation of images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
from unirl.trainer.samples import NUM_VIDEOS, scores_of, take_drawn, take_images, take_pictures, take_videos
from unirl.types.bounds import NonNegative, NonNegativeInt, PositiveInt, bounded
from unirl.types.rollout import RolloutReq
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
    post_solver: of every step, as `DiffusionSamplingParams.post_solver`. num_images: kept for the grid."""

    num_inference_steps: PositiveInt | None = None
    guidance_scale: NonNegative | None = None
    guidance_scale_2: NonNegative | None = None
    distilled_guidance_scale: NonNegative | None = None
    post_solver: PostSolver = "euler"
    num_images: NonNegativeInt = 16

    def settings(self, training: DiffusionSamplingParams) -> dict[str, dict[str, Any]]:  # Any: plain values
        params = self.params(training)
        return {
            "eval": self._without("num_images", *EVALUATED_SAMPLING),
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
        self._num_images = config.num_images
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

    def run(self, runtime: Runtime, track: str | None = None) -> EvaluationResult:
        plan = runtime.role("engine", DiffusionEngineRole).plan(self._params)

        def build(rows: list[PromptRow]) -> RolloutReq:
            return build_request(
                rows, self._params, sigmas=plan.sigmas, latent_shape=plan.latent_shape, rollout_id=EVAL_ROLLOUT_ID
            )

        return judged_images(self._rows, build, runtime, config=self.config, num_images=self._num_images, track=track)


def judged_images(
    rows: Sequence[PromptRow],
    build: Callable[[list[PromptRow]], RolloutReq],
    runtime: Runtime,
    *,
    config: HeldOut,
    num_images: int,
    track: str | None = None,
) -> EvaluationResult:
    """Generate and score one image of every row, and keep the first `num_images`. See `scored_batches`."""
    scores = Scores()
    images: list[Tensor] = []
    videos: list[Tensor] = []
    fps: float | None = None
    labels: list[str] = []
    pictures: list[list[Tensor]] = []
    drawn: list[str] = []
    kept: list[dict[str, float] | None] = []
    for batch in scored_batches(rows, build, runtime, config=config, track=track):
        scores.add_samples(batch)
        wanted = num_images - sum(len(part) for part in images)
        if wanted > 0:
            most, step = wanted * batch.branch, slice(None, None, batch.branch)  # one per prompt
            parts = torch.cat(batch.resp.map(take_images, batch.name, most))[step][: min(wanted, len(batch.rows))]
            images.append(parts)
            shown = batch.resp.map(take_pictures, batch.name, most)
            pictures += [each for part in shown for each in part][step][: len(parts)]
            written = batch.resp.map(take_drawn, batch.name, most)
            drawn += [each for part in written for each in part][step][: len(parts)]
            for own, own_fps in batch.resp.map(take_videos, batch.name, min(wanted, NUM_VIDEOS) * batch.branch):
                videos, fps = [*videos, *own[step]], own_fps
            labels.extend(row.prompt for row in batch.rows[: len(parts)])
            kept.extend(scores_of(batch.track, len(parts)))
    return EvaluationResult(
        categories=scores.categories(),
        overall=scores.overall(),
        num_samples=scores.num_scored,
        images=torch.cat(images) if images else None,
        videos=videos[: min(NUM_VIDEOS, len(labels))],
        fps=fps,
        labels=labels,
        pictures=pictures,
        scores=kept,
        num_failed=len(scores.errors),
        drawn=drawn,
    )
