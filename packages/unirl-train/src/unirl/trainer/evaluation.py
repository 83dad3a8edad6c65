"""Held-out evaluation: the same prompts, noise and solver each time, so that only the weights differ."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from unirl.data.data_source import PromptRow, epoch_order
from unirl.distributed.runtime import Held, Runtime
from unirl.tracking.base import TableRow
from unirl.tracking.video import STRIP_FRAMES, strip
from unirl.trainer.request import build_request
from unirl.trainer.roles import DiffusionEngineRole, EngineRole, RewardRole
from unirl.types.bounds import NonNegative, NonNegativeInt, Positive, PositiveInt, Seed, bounded
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.media import ImageLists, Images, SizedImages, Texts, Videos, pixel_bytes, pixel_floats
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams, PostSolver
from unirl.types.segments import SizedLatents

EVAL_ROLLOUT_ID = -1
"""Part of every noise id, so evaluation noise never equals training noise."""

NUM_VIDEOS = 4
"""Videos that a run shows whole at a time."""
SCHEDULING = ("before", "interval", "interval_cpu_s", "policy")
"""Options of every evaluation that say when it happens and of which weights, not what it measures."""
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


class Evaluates(Protocol):
    """How a recipe's `eval` section is evaluated: what `eval._target_` names."""

    @property
    def prompts(self) -> str:
        """File of prompts."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """Names of held-out means that a comparison shows beside the one it judges by."""
        ...

    def settings(self, training: Any) -> Mapping[str, Mapping[str, Any]]:  # Any: the trainer's parameters; plain values
        """All that the means depend on besides weights and scorers, by section of the recipe."""
        ...

    def evaluator(self, rows: Sequence[PromptRow], training: Any) -> BaseEvaluator:  # Any: the trainer's parameters
        """The evaluation of these prompts by a policy that trains with sampling parameters `training`."""
        ...


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What evaluations of every modality have.

    prompts: file of prompts. num_samples: in all, spread evenly over the prompts. interval: rollouts between
    evaluations; 0 evaluates only before and after. interval_cpu_s: in its place, CPU seconds of training between
    evaluations. batch_size: samples a request. seed: of the sampling. policy: named copy of the weights to evaluate,
    None the policy being trained. before: whether there is an evaluation before training."""

    recipe_rules: ClassVar[str] = "unirl.trainer.evaluation_rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""
    prompts: str
    num_samples: PositiveInt = 512
    interval: NonNegativeInt = 0
    interval_cpu_s: Positive | None = None
    batch_size: PositiveInt = 128
    seed: Seed = 1234
    policy: str | None = None
    before: bool = True

    def __post_init__(self) -> None:
        if self.interval_cpu_s is not None and self.interval > 0:
            raise ConfigError(
                f"eval.interval = {self.interval} rollouts and eval.interval_cpu_s = {self.interval_cpu_s} both say "
                "when to evaluate. Set interval: 0 or interval_cpu_s: null."
            )

    @property
    def columns(self) -> Sequence[str]:
        """See `Evaluates.columns`: none."""
        return ()

    def _without(self, *names: str) -> dict[str, Any]:  # Any: plain values
        """The options but those of `SCHEDULING` and `names`."""
        left_out = {*SCHEDULING, *names}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}


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
        """See `Evaluates.settings`."""
        params = self.params(training)
        return {
            "eval": self._without("num_images", *EVALUATED_SAMPLING),
            "sampling": {name: getattr(params, name) for name in EVALUATED_SAMPLING},
        }

    def evaluator(self, rows: Sequence[PromptRow], training: DiffusionSamplingParams) -> BaseEvaluator:
        """See `Evaluates.evaluator`."""
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


@dataclass(frozen=True)
class EvaluationResult:
    """Mean of the reward and of each component, overall and by category, and some images."""

    overall: dict[str, float]
    categories: dict[str, dict[str, float]]
    num_samples: int
    """Scored ones."""
    images: Tensor | None = None
    """[K, 3, H, W] in [0, 1]; of videos, a strip of frames each."""
    labels: list[str] = field(default_factory=list)
    """Prompts of `images`."""
    scores: list[dict[str, float] | None] = field(default_factory=list)
    """Reward and components of each of `images`; None where it could not be scored."""
    num_failed: int = 0
    """Samples without a score (reward.on_failure: drop_group), left out of the means."""
    completions: list[TableRow] = field(default_factory=list)
    """Some texts with their prompts and scores."""
    pictures: list[list[Tensor]] = field(default_factory=list)
    """What the prompt of each of `images` or `completions` shows, [3, H, W] each; none where it is a text alone."""
    videos: list[Tensor] = field(default_factory=list)
    """The first NUM_VIDEOS of `images` whole, uint8 [F, 3, H, W] each; empty where images are made."""
    fps: float | None = None
    """Frames per second of `videos`."""
    drawn: list[str] = field(default_factory=list)
    """What each of `images` was drawn from, where a writer wrote it; empty where that is the prompt itself."""

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
    """The first decoded images of a response [<= count, 3, H, W] (runs where the response lies): of videos a strip of
    frames each, of images of different sizes each as large as it fits into the recipe's size. Empty where the engine
    decodes nothing. Raises ContractError for other media."""
    decoded = resp.tracks[track].decoded
    match decoded:
        case None:
            return torch.empty(0)
        case Images():
            return pixel_floats(decoded.pixels[:count]).cpu().contiguous()
        case SizedImages():
            segment = resp.tracks[track].segment
            params = segment.params if isinstance(segment, SizedLatents) else None
            if params is None:
                raise ContractError(f"track {track!r} does not say how its images were sampled, nor their size")
            return torch.stack([fitted(image, params.height, params.width) for image in decoded.images[:count]])
        case Videos():
            videos = _first_videos(decoded, count)
            num_frames = min(STRIP_FRAMES, max(map(len, videos), default=STRIP_FRAMES))
            return torch.stack([strip(pixel_floats(frames).cpu(), num_frames) for frames in videos])
        case other:
            raise ContractError(f"track {track!r} holds {type(other).__name__}, which a grid of images cannot show")


def fitted(image: Tensor, height: int, width: int) -> Tensor:
    """An image [3, H, W] as large as it fits into `height` x `width`, in the middle of white: float32 in [0, 1]."""
    scale = min(height / image.shape[1], width / image.shape[2])
    size = max(1, round(image.shape[1] * scale)), max(1, round(image.shape[2] * scale))
    small = torch.nn.functional.interpolate(
        pixel_floats(image).cpu().float()[None], size, mode="bilinear", antialias=True, align_corners=False
    )[0]
    sheet = torch.ones(3, height, width)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    sheet[:, top : top + size[0], left : left + size[1]] = small.clamp(0, 1)
    return sheet


def take_videos(resp: RolloutResp, track: str, count: int) -> tuple[list[Tensor], float | None]:
    """The first decoded videos of a response, uint8 [F, 3, H, W] each, and their frames per second; none of images
    (runs where the response lies)."""
    decoded = resp.tracks[track].decoded
    if not isinstance(decoded, Videos):
        return [], None
    videos = [pixel_bytes(video).cpu() for video in _first_videos(decoded, count)]
    return videos, decoded.fps


def _first_videos(decoded: Videos, count: int) -> list[Tensor]:
    return decoded.slice(0, min(count, decoded.batch_size)).unpack("frames")


def take_prompts(resp: RolloutResp, track: str, count: int) -> list[str]:
    """The prompts of the first samples, empty ones where there are no texts (runs where the response lies)."""
    own = resp.with_inputs(track)
    texts = own.primitives.get("text")
    return (texts.texts if isinstance(texts, Texts) else [""] * own.batch_size)[:count]


def take_pictures(resp: RolloutResp, track: str, count: int) -> list[list[Tensor]]:
    """The pictures that the prompt of each of the first samples shows, none for a text alone (runs where the response
    lies)."""
    own = resp.with_inputs(track)
    pictures = own.primitives.get("image")
    images = pictures.images if isinstance(pictures, ImageLists) else [[]] * own.batch_size
    return [list(each) for each in images[:count]]


def take_drawn(resp: RolloutResp, track: str, count: int) -> list[str]:
    """What the first samples of a track that grew from texts were drawn from, a thought or a prompt; none of a root
    (runs where the response lies)."""
    own = resp.track(track)
    texts = own.primitives.get("thought", own.primitives.get("text"))
    return texts.texts[:count] if own.parent_track is not None and isinstance(texts, Texts) else []


@dataclass(frozen=True)
class ScoredBatch:
    """Some evaluation samples with their scores."""

    rows: list[PromptRow]
    """One row per prompt; what fills the batch up for the devices comes after them and is not among them."""
    resp: Held
    name: str
    """Of the track that was scored, which holds the media."""
    track: RolloutTrack
    """The root with the rewards of its samples, `samples_per_prompt` per row, in their order; without media."""
    branch: int
    """Samples of the scored track per sample of the root, next to each other."""


def scored_batches(
    rows: Sequence[PromptRow],
    build: Callable[[list[PromptRow]], RolloutReq],
    runtime: Runtime,
    *,
    config: HeldOut,
    samples_per_prompt: int = 1,
    track: str | None = None,
) -> Iterator[ScoredBatch]:
    """Generate and score all rows, `config.batch_size` samples at a time. A batch is released where the next begins.

    track: the one that is scored; None is the root, which else is credited with the scores of what grew from it.
    """
    engine, reward = runtime.role("engine", EngineRole), runtime.role("reward", RewardRole)
    step = max(1, config.batch_size // samples_per_prompt)
    for start in range(0, len(rows), step):
        part = list(rows[start : start + step])
        padded = list(part)
        while (len(padded) * samples_per_prompt) % runtime.num_shards:
            padded.append(part[0])
        req = build(padded)
        with engine.generate(req, policy=config.policy) as resp:
            name = track or resp.meta.root_name()
            reward.score_track(resp, name, is_shaped=False)
            resp.refresh()
            meta = resp.meta
            branch = meta.track(name).batch_size // meta.batch_size
            yield ScoredBatch(part, resp, name, meta.root_track(), branch)


class Scores:
    """Means of named values, overall and by category."""

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, list[float]]] = {}
        self.errors: list[str | None] = []
        """One for every sample without a score."""
        self.num_scored = 0

    def add(self, row: PromptRow, values: Mapping[str, float]) -> None:
        """Count the values of one row's sample, or of all of them together."""
        own = self._totals.setdefault(category_of(row), {})
        for name, value in values.items():
            own.setdefault(name, []).append(value)

    def add_samples(self, batch: ScoredBatch) -> None:
        """Count the reward and each component of a batch with one sample a row."""
        errors = batch.track.reward_errors
        for i, row in enumerate(batch.rows):
            if errors[i] is None:
                self.num_scored += 1
                self.add(row, sample_values(batch.track, i))
            else:
                self.errors.append(errors[i])

    def categories(self) -> dict[str, dict[str, float]]:
        """Means by category and name. Raises RewardError where nothing was scored."""
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


def sample_values(track: RolloutTrack, sample: int) -> dict[str, float]:
    """The reward and each component of one sample of a scored track."""
    columns = {"reward": track.scored_rewards, **track.component_rewards}
    return {name: float(values[sample]) for name, values in columns.items()}


def scores_of(track: RolloutTrack, count: int) -> list[dict[str, float] | None]:
    """The values of the first samples; None for one that could not be scored."""
    return [sample_values(track, i) if track.reward_errors[i] is None else None for i in range(count)]


class BaseEvaluator(ABC):
    """Scores the policy on held-out prompts."""

    config: HeldOut

    @property
    @abstractmethod
    def rows(self) -> list[PromptRow]:
        """Every prompt that an evaluation uses, as often as it does."""

    @property
    @abstractmethod
    def all_params(self) -> list[Any]:  # Any: sampling parameters of the modality
        """Every way in which it samples."""

    @abstractmethod
    def run(self, runtime: Runtime, track: str | None = None) -> EvaluationResult:
        """Generate and score every evaluation sample.

        track: the one whose media are scored; None is the root.
        Raises what the engine or a scorer raises, and RewardError where no sample could be scored.
        """


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
        """See `BaseEvaluator.run`."""
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
