"""Held-out evaluation in two stages: a text of every prompt and an image of it, and images without the writer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unirl.data.data_source import PromptRow
from unirl.distributed.runtime import Runtime
from unirl.trainer.evaluation import EVALUATED_SAMPLING, EvaluationConfig, judged_images
from unirl.trainer.held_out import EVAL_ROLLOUT_ID, BaseEvaluator, EvaluationResult, spread_rows
from unirl.trainer.request import build_composed_request, build_request
from unirl.trainer.roles import DiffusionEngineRole
from unirl.types.bounds import NonNegative, PositiveInt, bounded
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams, ComposedSamplingParams, DiffusionSamplingParams

WITHOUT_WRITER = "without_writer"
"""Before the names of means of images that were drawn from the prompts themselves."""


@bounded("eval")
@dataclass(frozen=True, kw_only=True)
class ComposedEvaluationConfig(EvaluationConfig):
    """Held-out evaluation of a writer with its painter, see `EvaluationConfig`.

    temperature: of the texts; 0 takes the most probable token each time. max_new_tokens: None takes that of training.
    without_writer: whether images of the prompts themselves are judged beside, under without_writer/<mean>.
    """

    temperature: NonNegative = 0.0
    max_new_tokens: PositiveInt | None = None
    without_writer: bool = False

    # ComposedSamplingParams in the place of the base's: what a recipe samples with follows from its engine.
    def settings(self, training: Any) -> dict[str, dict[str, Any]]:  # Any: the trainer's parameters; plain values
        text, image = self.texts(training.ar), self.params(training.diffusion)
        return {
            "eval": self._without("temperature", "max_new_tokens", *EVALUATED_SAMPLING),
            "sampling": {
                "ar": dataclasses.asdict(text),
                **{name: getattr(image, name) for name in EVALUATED_SAMPLING},
            },
        }

    def texts(self, training: ARSamplingParams) -> ARSamplingParams:
        """How a text of each prompt is sampled."""
        return dataclasses.replace(
            training,
            samples_per_prompt=1,
            temperature=self.temperature,
            top_p=1.0,
            top_k=0,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens or training.max_new_tokens,
        )

    def evaluator(self, rows: Sequence[PromptRow], training: Any) -> ComposedEvaluator:  # Any: as `settings`
        return ComposedEvaluator(self, rows, training)


class ComposedEvaluator(BaseEvaluator):
    """Held-out images of texts that a writer makes of the prompts."""

    def __init__(
        self, config: ComposedEvaluationConfig, rows: Sequence[PromptRow], training: ComposedSamplingParams
    ) -> None:
        self.config = self._options = config
        self._rows = spread_rows(rows, config.num_samples)
        self._params = ComposedSamplingParams(ar=config.texts(training.ar), diffusion=config.params(training.diffusion))

    @property
    def rows(self) -> list[PromptRow]:
        """Every prompt that an evaluation uses."""
        return self._rows

    @property
    def all_params(self) -> list[ComposedSamplingParams | DiffusionSamplingParams]:
        """In two stages, and where that is asked for without the writer."""
        return [self._params, self._params.diffusion] if self._options.without_writer else [self._params]

    def run(
        self, runtime: Runtime, track: str | None = None, *, num_records: int = 0, num_videos: int = 0
    ) -> EvaluationResult:
        """See `BaseEvaluator.run`. Pictures are those with the writer."""
        plan = runtime.role("engine", DiffusionEngineRole).plan(self._params.diffusion)
        pinned: dict[str, Any] = {  # Any: keywords
            "sigmas": plan.sigmas,
            "latent_shape": plan.latent_shape,
            "rollout_id": EVAL_ROLLOUT_ID,
        }

        def in_two_stages(rows: list[PromptRow]) -> RolloutReq:
            return build_composed_request(rows, self._params, **pinned)

        def directly(rows: list[PromptRow]) -> RolloutReq:
            return build_request(rows, self._params.diffusion, **pinned)

        options = self._options
        written = judged_images(
            self._rows,
            in_two_stages,
            runtime,
            config=options,
            num_records=num_records,
            num_videos=num_videos,
            track=track,
        )
        if not options.without_writer:
            return written
        direct = judged_images(self._rows, directly, runtime, config=options, track=track)
        return dataclasses.replace(
            written,
            overall=_beside(written.overall, direct.overall),
            categories={
                name: _beside(own, direct.categories.get(name, {})) for name, own in written.categories.items()
            },
            num_failed=written.num_failed + direct.num_failed,
        )


def _beside(written: dict[str, float], direct: dict[str, float]) -> dict[str, float]:
    return {**written, **{f"{WITHOUT_WRITER}/{name}": value for name, value in direct.items()}}
