"""Held-out evaluation: samples every stage the same way each time, records samples, and averages scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from unirl.data.data_source import PromptRow
from unirl.distributed.runtime import Runtime
from unirl.trainer.held_out import (
    EVAL_ROLLOUT_ID,
    EvaluationResult,
    ScoredBatch,
    Scores,
    scored_batches,
    spread_rows,
)
from unirl.trainer.request import pinned_request
from unirl.trainer.samples import scores_of
from unirl.types.bounds import (
    Bounds,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveFraction,
    PositiveInt,
    Seed,
    bounded,
)
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutReq
from unirl.types.samples import SampleRecord
from unirl.types.sampling import (
    ActionSamplingParams,
    ARSamplingParams,
    BaseSamplingParams,
    DiffusionSamplingParams,
    PostSolver,
    StagedSamplingParams,
)

PASS_ROLLOUT_ID = EVAL_ROLLOUT_ID - 1
"""Part of every draw's key, so that samples of pass@k differ from training's."""
WITHOUT_WRITER = "without_writer"
"""Prefix of the means of images drawn directly from the prompts."""
SCALES = ("guidance_scale", "guidance_scale_2", "distilled_guidance_scale")
"""Guidance scales that an evaluation may set itself."""
EVALUATED_SAMPLING = (
    "num_inference_steps",
    *SCALES,
    "post_solver",
    "negative_prompt",
    "height",
    "width",
    "num_frames",
    "max_sequence_length",
    "autocast_precision",
    "sampler_kwargs",
)
"""Diffusion sampling parameters that an evaluation sets itself or takes from training."""
NOT_MEASURED = ("before", "interval", "interval_cpu_s", "policy")
"""Options that choose when and which weights to evaluate, not what is measured."""
IN_SAMPLING = (
    "num_inference_steps",
    *SCALES,
    "post_solver",
    "temperature",
    "max_new_tokens",
    "pass_temperature",
    "pass_top_p",
)
"""Options that are part of the sampling parameters."""


@bounded("eval")
@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What an evaluation samples and how. `unirl.trainer.evaluation_rules` checks which options fit which stages.

    prompts: file of prompts. num_samples: in all, spread evenly over the prompts. interval: rollouts between
        evaluations; 0 evaluates only before and after. interval_cpu_s: instead, CPU seconds of training between
        evaluations. batch_size: samples per request. seed: sampling seed. policy: named copy of the weights to
        evaluate, by policy if there are several; None is the policy being trained. before: evaluate before training
        too.
    Images and videos: num_inference_steps and the three scales; None takes training's. post_solver: for every step, as
        `DiffusionSamplingParams.post_solver`.
    Texts: max_new_tokens, None takes training's. temperature: 0 is greedy.
    Episodes: temperature: 0 takes the most probable actions, above 0 they are drawn.
    Runs of texts only: pass_at: values of k for pass@k. pass_samples: completions per prompt, at least the largest k.
        pass_prompts: prompts sampled. pass_metric: a completion is right if this score reaches pass_threshold.
        pass_temperature, pass_top_p: of these samples; a temperature of None takes training's.
    without_writer: also evaluate images drawn directly from the prompts, under without_writer/<mean>.
    """

    recipe_rules: ClassVar[str] = "unirl.trainer.evaluation_rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""
    prompts: str
    num_samples: PositiveInt = 512
    interval: NonNegativeInt = 0
    interval_cpu_s: Positive | None = None
    batch_size: PositiveInt = 128
    seed: Seed = 1234
    policy: str | Mapping[str, str] | None = None
    before: bool = True
    num_inference_steps: PositiveInt | None = None
    guidance_scale: NonNegative | None = None
    guidance_scale_2: NonNegative | None = None
    distilled_guidance_scale: NonNegative | None = None
    post_solver: PostSolver = "euler"
    max_new_tokens: PositiveInt | None = None
    temperature: NonNegative = 0.0
    pass_at: Sequence[int] = ()
    pass_samples: PositiveInt = 8
    pass_prompts: PositiveInt = 64
    pass_metric: str = "reward"
    pass_threshold: Annotated[float, Bounds()] = 1.0
    pass_temperature: NonNegative | None = None
    pass_top_p: PositiveFraction = 1.0
    without_writer: bool = False

    def __post_init__(self) -> None:
        if self.interval_cpu_s is not None and self.interval > 0:
            raise ConfigError(
                f"eval.interval = {self.interval} rollouts and eval.interval_cpu_s = {self.interval_cpu_s} both say "
                "when to evaluate. Set interval: 0 or interval_cpu_s: null."
            )
        wrong = [k for k in self.pass_at if not 1 <= k <= self.pass_samples]
        if wrong:
            raise ConfigError(f"eval.pass_at {wrong} must lie in 1 .. eval.pass_samples = {self.pass_samples}")

    @property
    def columns(self) -> Sequence[str]:
        """Further held-out means that a comparison shows: pass@k."""
        return [pass_name(k) for k in self.pass_at]

    def settings(self, training: BaseSamplingParams) -> dict[str, dict[str, Any]]:  # Any: plain values
        """All settings that the means depend on besides weights and scorers, by section of the recipe."""
        left_out = {*NOT_MEASURED, *IN_SAMPLING}
        measured = {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}
        sampling = _described(self.params(training))
        if self.pass_at and isinstance(training, ARSamplingParams):
            sampling["passes"] = _described(self.passes(training))
        return {"eval": measured, "sampling": sampling}

    def evaluator(self, rows: Sequence[PromptRow], training: BaseSamplingParams) -> Evaluator:
        """The evaluator of these prompts for a policy that trains with sampling parameters `training`."""
        return Evaluator(self, rows, training)

    def params(self, training: BaseSamplingParams) -> Any:  # Any: of the class of `training`
        """The evaluation's counterpart of the sampling parameters `training`, for each stage."""
        match training:
            case DiffusionSamplingParams():
                return self.latents(training)
            case ARSamplingParams():
                return self.texts(training)
            case ActionSamplingParams():
                return self.actions(training)
            case StagedSamplingParams():
                return StagedSamplingParams(stages={track: self.params(own) for track, own in training.stages.items()})
        raise ContractError(f"no evaluation is known of samples by {type(training).__name__}")

    def latents(self, training: DiffusionSamplingParams) -> DiffusionSamplingParams:
        """Deterministic sampling of images and videos: training's geometry, own seed, no noise."""
        return dataclasses.replace(
            training,
            samples_per_prompt=1,
            eta=0.0,
            scheduler=None,
            sde_indices=[],
            init_same_noise=False,
            branch_steps=None,
            branch_factors=None,
            one_step=None,
            post_solver=self.post_solver,
            post_step_ratio=1.0,
            keep_latents="last",
            seed=self.seed,
            num_inference_steps=self.num_inference_steps or training.num_inference_steps,
            **{name: scale for name in SCALES if (scale := getattr(self, name)) is not None},
        )

    def texts(self, training: ARSamplingParams) -> ARSamplingParams:
        """One text per prompt, greedy by default."""
        return dataclasses.replace(
            training,
            samples_per_prompt=1,
            temperature=self.temperature,
            top_p=1.0,
            top_k=0,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens or training.max_new_tokens,
        )

    def actions(self, training: ActionSamplingParams) -> ActionSamplingParams:
        """One episode per start: with temperature 0 (the default) by the most probable bins and without noise in a
        flow's steps, else as in training but for the temperature of bins."""
        return dataclasses.replace(
            training,
            samples_per_prompt=1,
            seed=self.seed,
            eta=training.eta if self.temperature > 0 else 0.0,
            temperature=self.temperature,
        )

    def passes(self, training: ARSamplingParams) -> ARSamplingParams:
        """Sampling parameters of pass@k."""
        return dataclasses.replace(
            self.texts(training),
            samples_per_prompt=self.pass_samples,
            temperature=training.temperature if self.pass_temperature is None else self.pass_temperature,
            top_p=self.pass_top_p,
        )


class Evaluator:
    """Scores the policy on held-out prompts, for any stages."""

    def __init__(self, config: EvaluationConfig, rows: Sequence[PromptRow], training: BaseSamplingParams) -> None:
        self.config = config
        self.params: Any = config.params(training)  # Any: as above
        """Sampling parameters of the samples whose means are reported."""
        self._rows = spread_rows(rows, config.num_samples)
        self._pass_rows: list[PromptRow] = []
        if config.pass_at:
            if not isinstance(training, ARSamplingParams):
                raise ConfigError(f"eval.pass_at counts right texts, this run samples by {type(training).__name__}")
            self._pass_rows = spread_rows(rows, min(config.pass_prompts, len(rows)))
            self._pass_params = config.passes(training)

    @property
    def rows(self) -> list[PromptRow]:
        """Every prompt of an evaluation, repeated as often as it is used."""
        return [*self._rows, *self._pass_rows]

    @property
    def all_params(self) -> list[Any]:  # Any: as above
        """All sampling parameters that it uses."""
        ways: list[Any] = [self.params, *([self._pass_params] if self._pass_rows else [])]
        return [*ways, self._without_writer()] if self.config.without_writer else ways

    def run(
        self, runtime: Runtime, track: str | None = None, *, num_records: int = 0, num_videos: int = 0
    ) -> EvaluationResult:
        """Generate and score every evaluation sample.

        track: whose media are scored; None is the root. num_records: prompts whose samples are recorded, the first
        `num_videos` of them with whole videos; samples of pass@k are not recorded.
        Raises what the engine or a scorer raises, and RewardError if no sample could be scored.
        """
        scores, num_rows = Scores(), 0
        records: list[SampleRecord] = []
        for batch in self._batches(runtime, self._rows, self.params, track):
            scores.add_samples(batch)
            if num_rows < num_records:
                records += batch.records(num_records - num_rows, max(0, num_videos - num_rows))
            num_rows += len(batch.rows)
        if self._pass_rows:
            for batch in self._batches(runtime, self._pass_rows, self._pass_params, track, PASS_ROLLOUT_ID):
                self._add_passes(scores, batch)
        result = EvaluationResult(
            categories=scores.categories(),
            overall=scores.overall(),
            num_samples=scores.num_scored,
            num_failed=len(scores.errors),
            records=records,
        )
        return self._beside_direct(result, runtime, track) if self.config.without_writer else result

    def _batches(
        self,
        runtime: Runtime,
        rows: Sequence[PromptRow],
        params: BaseSamplingParams,
        track: str | None,
        rollout_id: int = EVAL_ROLLOUT_ID,
    ) -> Iterator[ScoredBatch]:
        def build(part: list[PromptRow]) -> RolloutReq:
            return pinned_request(runtime, part, params, rollout_id)

        return scored_batches(
            rows,
            build,
            runtime,
            batch_size=self.config.batch_size,
            policy=self.config.policy,
            samples_per_prompt=params.samples_per_prompt,
            track=track,
        )

    def _add_passes(self, scores: Scores, batch: ScoredBatch) -> None:
        """Add pass@k of every prompt of a batch; a prompt with unscored samples counts as failed."""
        size = self.config.pass_samples
        for number, row in enumerate(batch.rows):
            samples = range(number * size, (number + 1) * size)
            failed = [error for i in samples if (error := batch.track.reward_errors[i]) is not None]
            if failed:
                scores.errors.append(failed[0])
                continue
            num_right = sum(self._is_right(scores_of(batch.track, i)) for i in samples)
            scores.add(row, {pass_name(k): pass_at(k, num_right, size) for k in self.config.pass_at})

    def _is_right(self, values: Mapping[str, float]) -> bool:
        if self.config.pass_metric not in values:
            raise ConfigError(
                f"eval.pass_metric = {self.config.pass_metric} is not among the scores {', '.join(values)}. "
                "Name one of those."
            )
        return values[self.config.pass_metric] >= self.config.pass_threshold

    def _without_writer(self) -> BaseSamplingParams:
        if not isinstance(self.params, StagedSamplingParams):
            raise ContractError(f"{type(self.params).__name__} has no writer to do without")
        stages = self.params.stages.items()
        return StagedSamplingParams(
            stages={track: own for track, own in stages if isinstance(own, DiffusionSamplingParams)}
        )

    def _beside_direct(self, written: EvaluationResult, runtime: Runtime, track: str | None) -> EvaluationResult:
        """The result, with the means of images drawn directly from the prompts added."""
        direct = Scores()
        for batch in self._batches(runtime, self._rows, self._without_writer(), track):
            direct.add_samples(batch)
        categories = direct.categories()
        return dataclasses.replace(
            written,
            overall={**written.overall, **_prefixed(direct.overall())},
            categories={
                name: {**own, **_prefixed(categories.get(name, {}))} for name, own in written.categories.items()
            },
            num_failed=written.num_failed + len(direct.errors),
        )


def pass_name(k: int) -> str:
    """Name of the pass@k metric."""
    return f"pass@{k}"


def pass_at(k: int, num_right: int, num_samples: int) -> float:
    """Unbiased estimate of the probability that one of k samples is right, if c of n are: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021 (arXiv 2107.03374), eq. 1.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _prefixed(means: Mapping[str, float]) -> dict[str, float]:
    return {f"{WITHOUT_WRITER}/{name}": value for name, value in means.items()}


def _described(params: BaseSamplingParams) -> dict[str, Any]:  # Any: plain values
    """The settings in `params` that an evaluation depends on, for every stage."""
    match params:
        case DiffusionSamplingParams():
            return {name: getattr(params, name) for name in EVALUATED_SAMPLING}
        case StagedSamplingParams():
            return {track: _described(own) for track, own in params.stages.items()}
    return dataclasses.asdict(params)
