"""Held-out evaluation: the same prompts, noise and solver each time, so that only the weights differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unirl.data.data_source import PromptRow, epoch_order
from unirl.distributed.runtime import Role
from unirl.trainer.request import build_request
from unirl.types.errors import ConfigError, RewardError
from unirl.types.media import Images
from unirl.types.rollout import RolloutResp
from unirl.types.sampling import DiffusionSamplingParams

EVAL_ROLLOUT_ID = -1
"""Part of every noise id, so evaluation noise never equals training noise."""


@dataclass(frozen=True)
class EvaluationConfig:
    """interval: rollouts between evaluations; 0 evaluates only before and after. interval_cpu_s: in its place, CPU
    seconds of training between evaluations. num_samples: images in all, spread evenly over the prompts. batch_size:
    images a request. policy: named copy of the weights to evaluate, None the policy being trained. num_images: images
    kept for the grid."""

    prompts: str
    num_samples: int = 512
    interval: int = 0
    interval_cpu_s: float | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    batch_size: int = 128
    seed: int = 1234
    policy: str | None = None
    num_images: int = 16
    before: bool = True

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"eval.{name} = {getattr(self, name)} must be at least 1")
        if self.interval < 0 or self.num_images < 0:
            raise ConfigError("eval.interval and eval.num_images must be at least 0")
        if self.interval_cpu_s is not None and not self.interval_cpu_s > 0:
            raise ConfigError(f"eval.interval_cpu_s = {self.interval_cpu_s} must be above 0, or null")
        if self.interval_cpu_s is not None and self.interval > 0:
            raise ConfigError(
                f"eval.interval = {self.interval} rollouts and eval.interval_cpu_s = {self.interval_cpu_s} both say "
                "when to evaluate. Set interval: 0 or interval_cpu_s: null."
            )

    def params(self, training: DiffusionSamplingParams) -> DiffusionSamplingParams:
        """Deterministic sampling parameters for evaluation: training's geometry, own seed, no noise."""
        return dataclasses.replace(
            training,
            samples_per_prompt=1,
            eta=0.0,
            scheduler=None,
            sde_indices=[],
            init_same_noise=False,
            post_solver="euler",
            post_step_ratio=1.0,
            keep_latents="last",
            seed=self.seed,
            num_inference_steps=self.num_inference_steps or training.num_inference_steps,
            guidance_scale=training.guidance_scale if self.guidance_scale is None else self.guidance_scale,
        )


@dataclass(frozen=True)
class EvaluationResult:
    """Mean of the reward and of each component, overall and by category, and some images."""

    overall: dict[str, float]
    categories: dict[str, dict[str, float]]
    num_samples: int
    """Scored ones."""
    images: Tensor | None = None
    """[K, 3, H, W] in [0, 1]."""
    labels: list[str] = field(default_factory=list)
    num_failed: int = 0
    """Samples without a score (reward.on_failure: drop_group), left out of the means."""

    def metrics(self) -> dict[str, float]:
        """Flat names: eval/<component>, eval/<category>/<component>, and eval/failed_samples where there are any."""
        flat = {f"eval/{name}": value for name, value in self.overall.items()}
        if self.num_failed:
            flat["eval/failed_samples"] = float(self.num_failed)
        for category, values in self.categories.items():
            flat.update({f"eval/{category}/{name}": value for name, value in values.items()})
        return flat

    def record(self) -> dict[str, object]:
        """What the run's summary keeps."""
        return {"overall": self.overall, "categories": self.categories, "num_samples": self.num_samples}


def spread_rows(rows: Sequence[PromptRow], num_samples: int) -> list[PromptRow]:
    """`num_samples` rows that go through the prompts in turn; every repetition gets noise of its own.

    Categories take turns too and prompts come in a fixed shuffled order, so a prefix of the list shows variety.
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
    """The row's category, "all" where its metadata names none."""
    return str((row.metadata or {}).get("category", "all"))


def take_images(resp: RolloutResp, track: str, count: int) -> Tensor:
    """The first decoded images of a response [<= count, 3, H, W] (runs where the response lies)."""
    decoded = resp.tracks[track].decoded
    if not isinstance(decoded, Images):
        return torch.empty(0)
    return decoded.pixels[:count].cpu().contiguous()


class Evaluator:
    """Scores the policy on held-out prompts."""

    def __init__(
        self,
        config: EvaluationConfig,
        rows: Sequence[PromptRow],
        training: DiffusionSamplingParams,
        *,
        track: str = "image",
    ) -> None:
        self.config = config
        self._rows = spread_rows(rows, config.num_samples)
        self._params = config.params(training)
        self._track = track

    @property
    def prompts(self) -> list[str]:
        """Every prompt that an evaluation uses."""
        return [row.prompt for row in self._rows]

    @property
    def params(self) -> DiffusionSamplingParams:
        """How evaluation samples."""
        return self._params

    def run(self, engine: Role, reward: Role, num_ranks: int) -> EvaluationResult:
        """Generate and score every evaluation sample. Raises what the engine or a scorer raises, and RewardError where
        no sample could be scored."""
        plan = engine.plan(self._params)
        totals: dict[str, dict[str, list[float]]] = {}
        images: list[Tensor] = []
        labels: list[str] = []
        errors: list[str | None] = []
        for start in range(0, len(self._rows), self.config.batch_size):
            rows = self._rows[start : start + self.config.batch_size]
            padding = -len(rows) % num_ranks
            padded = [*rows, *rows[:1] * padding]
            req = build_request(
                padded,
                self._params,
                sigmas=plan.sigmas,
                latent_shape=plan.latent_shape,
                rollout_id=EVAL_ROLLOUT_ID,
            )
            with engine.generate(req, policy=self.config.policy) as resp:
                reply = reward.score_media(resp, req)
                wanted = self.config.num_images - sum(len(part) for part in images)
                if wanted > 0:
                    parts = torch.cat(resp.map(take_images, self._track, wanted))[: min(wanted, len(rows))]
                    images.append(parts)
                    labels.extend(row.prompt for row in rows[: len(parts)])
            scored = [i for i, is_scored in enumerate(reply.successes[: len(rows)]) if is_scored]
            errors.extend(reply.errors[i] for i in range(len(rows)) if i not in scored)
            columns = {"reward": reply.rewards, **reply.component_rewards}
            for name, values in columns.items():
                for i in scored:
                    totals.setdefault(category_of(rows[i]), {}).setdefault(name, []).append(float(values[i]))
        if not totals:
            raise RewardError(f"none of {len(self._rows)} evaluation samples could be scored; first error: {errors[0]}")
        categories = {
            category: {name: sum(values) / len(values) for name, values in columns.items()}
            for category, columns in sorted(totals.items())
        }
        names = {name: None for columns in totals.values() for name in columns}
        overall = {}
        for name in names:
            values = [value for columns in totals.values() for value in columns[name]]
            overall[name] = sum(values) / len(values)
        return EvaluationResult(
            overall,
            categories,
            len(self._rows) - len(errors),
            torch.cat(images) if images else None,
            labels,
            num_failed=len(errors),
        )
