"""How a batch is sampled: everything that replay must repeat."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self

from unirl.types.branching import Branching
from unirl.types.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS = ("fp32", "bf16", "fp16")
PostSolver = Literal["euler", "dpmpp_2m", "unipc"]
POST_SOLVERS = ("euler", "dpmpp_2m", "unipc")
KeptLatents = Literal["transitions", "all", "last"]
KEPT_LATENTS = ("transitions", "all", "last")
OneStep = Literal["prompt", "branch"]
ONE_STEP = ("prompt", "branch")


class IndexScheduler(Protocol):
    """Chooses the stochastic steps of a rollout. `unirl.sde.windows` has the usual ones."""

    def indices(self, rollout_id: int) -> list[int]:
        """Sorted step indices; the same in every process."""
        ...


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_integer(name: str, value: object, *, minimum: int | None = None) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    _require(is_integer, f"{name} = {value!r} must be an integer")
    if is_integer and minimum is not None:
        _require(value >= minimum, f"{name} = {value} must be at least {minimum}")


def _require_number(name: str, value: object, hint: str = "") -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _require(is_number, f"{name} = {value!r} must be a number")
    if is_number:
        _require(math.isfinite(value) and value >= 0, f"{name} = {value} must be finite and at least 0{hint}")


@dataclass(frozen=True, kw_only=True)
class BaseSamplingParams:
    """What every kind of sampling has."""

    recipe_rules: ClassVar[str] = "unirl.types.sampling_rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""
    samples_tokens: ClassVar[bool | None] = False
    """True if tokens are sampled; None where several stages sample different things."""
    samples_actions: ClassVar[bool] = False
    """True if episodes are played in an environment."""
    samples_per_prompt: int = 1

    def __post_init__(self) -> None:
        _require_integer("samples_per_prompt", self.samples_per_prompt, minimum=1)

    @property
    def is_float32(self) -> bool:
        """True if these parameters leave the model's own precision as it is or ask for float32."""
        return True

    @property
    def samples_made_together(self) -> int:
        """Consecutive rows of a request that one worker must make."""
        return 1


@dataclass(frozen=True, kw_only=True)
class DiffusionSamplingParams(BaseSamplingParams):
    """Sampling of an image or video by a flow-matching model."""

    num_inference_steps: int = 50
    guidance_scale: float = 7.5
    """1 means no guidance: the model runs once per step."""
    negative_prompt: str | None = None
    """Required where guidance_scale > 1; the empty string is a valid one."""
    height: int = 256
    """Pixels."""
    width: int = 256
    num_frames: int = 1
    """1 for images."""
    seed: int = 42
    """Base seed of initial noise and of per-step noise."""
    init_same_noise: bool = False
    """True if the samples of a group share their initial noise."""
    eta: float = 1.0
    """Noise level of the stochastic steps; 0 is deterministic sampling. Its range depends on the kernel."""
    sde_strategy: str | None = None
    """Name of the kernel, stamped on the request so that an engine with another kernel refuses."""
    scheduler: IndexScheduler | None = None
    """Chooses the stochastic steps of each rollout. Resolved by the driver and then dropped."""
    sde_indices: list[int] | None = None
    """The stochastic steps. Wins over `scheduler`; with neither, every step is stochastic."""
    branch_steps: list[int] | None = None
    """Stochastic steps at which the trajectories of a prompt part; before the first of them all are one. None: every
    sample has its own trajectory."""
    branch_factors: list[int] | None = None
    """Children of a node at each of `branch_steps`; their product is samples_per_prompt."""
    one_step: OneStep | None = None
    """Which of the stochastic steps a sample has. None: all. prompt: one, the samples of a prompt the same and prompts
    spread evenly over the steps. branch: one, the samples of a prompt spread evenly over the steps, in order."""
    post_solver: PostSolver = "euler"
    """Solver of the deterministic steps: Euler; dpmpp_2m (DPM-Solver++ of second order, SDXL's and Sana's) and unipc
    (UniPC of second order, Wan's) where no stochastic step follows."""
    post_step_ratio: float = 1.0
    """Share of the noise levels after the last stochastic step that is kept, two at least (one step); 1 keeps all."""
    keep_latents: KeptLatents = "transitions"
    """Stored positions: both ends of every stochastic step and the final latent, every position, or the final alone."""
    max_sequence_length: int | None = None
    """Tokens of the long text encoder; None takes the model's default."""
    autocast_precision: Precision = "bf16"
    trajectory_precision: Precision = "fp32"
    """Storage type of the trajectory; log-probs are taken on what is stored."""
    logprob_precision: Precision = "fp32"
    guidance_scale_2: float | None = None
    """Guidance of a second expert, where the model has one."""
    distilled_guidance_scale: float | None = None
    """Guidance that a distilled model takes as an input."""
    sampler_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # Any: model-specific values
    """What only one model understands. May not repeat a declared field."""

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.num_inference_steps
        for name in ("num_inference_steps", "height", "width", "num_frames"):
            _require_integer(name, getattr(self, name), minimum=1)
        _require_integer("seed", self.seed)
        _require_number("eta", self.eta, " (0 = no noise)")
        _require_number("guidance_scale", self.guidance_scale)
        for name in ("guidance_scale_2", "distilled_guidance_scale"):
            if getattr(self, name) is not None:
                _require_number(name, getattr(self, name))
        if self.max_sequence_length is not None:
            _require_integer("max_sequence_length", self.max_sequence_length, minimum=1)
        _require(
            self.post_solver in POST_SOLVERS,
            f"post_solver = {self.post_solver!r} must be one of {', '.join(POST_SOLVERS)}",
        )
        _require(
            self.keep_latents in KEPT_LATENTS,
            f"keep_latents = {self.keep_latents!r} must be one of {', '.join(KEPT_LATENTS)}",
        )
        _require_number("post_step_ratio", self.post_step_ratio)
        _require(0 < self.post_step_ratio <= 1, f"post_step_ratio = {self.post_step_ratio} must lie in (0, 1]")
        if self.sde_indices is not None:
            for i in self.sde_indices:
                _require_integer("a step of sde_indices", i)
            wrong = [i for i in self.sde_indices if not 0 <= i < steps]
            _require(not wrong, f"sde_indices {wrong} lie outside 0..{steps - 1} (num_inference_steps = {steps})")
            _require(
                len(set(self.sde_indices)) == len(self.sde_indices), f"sde_indices repeat a step: {self.sde_indices}"
            )
        self._check_branching()
        self._check_one_step()
        for name in ("autocast_precision", "trajectory_precision", "logprob_precision"):
            value = getattr(self, name)
            _require(value in PRECISIONS, f"{name} = {value!r} must be one of {', '.join(PRECISIONS)}")
        repeated = sorted(set(self.sampler_kwargs) & {field.name for field in dataclasses.fields(self)})
        _require(not repeated, f"sampler_kwargs repeats declared fields {repeated}; set those directly")

    def _check_branching(self) -> None:
        for name in ("branch_steps", "branch_factors"):
            for value in getattr(self, name) or []:
                _require_integer(f"an item of {name}", value)
        branching = self.branching
        if branching is None:
            return
        _require(
            branching.num_leaves == self.samples_per_prompt,
            f"samples_per_prompt = {self.samples_per_prompt} must be {branching.num_leaves}, the product of "
            f"branch_factors = {self.branch_factors}",
        )
        _require(self.init_same_noise, "branch_steps share the start of a prompt's samples. Set init_same_noise: true")
        _require(
            self.eta > 0, f"branch_steps = {self.branch_steps} need noise to part by. Set eta above 0 (0 = no noise)"
        )
        wrong = [step for step in branching.steps if not 0 <= step < self.num_inference_steps]
        _require(
            not wrong,
            f"branch_steps {wrong} lie outside 0..{self.num_inference_steps - 1} "
            f"(num_inference_steps = {self.num_inference_steps})",
        )
        if self.sde_indices is not None:
            self._check_branch_points(sorted(self.sde_indices))

    def _check_branch_points(self, stochastic: list[int]) -> None:
        """Raise ConfigError unless trajectories part at stochastic steps only, at the first of them too."""
        if self.branching is None:
            return
        wrong = [step for step in self.branching.steps if step not in stochastic]
        _require(
            not wrong,
            f"branch_steps {wrong} are not stochastic, and trajectories part by their noise alone; the stochastic "
            f"steps are {stochastic}. Branch at some of these, or make the others stochastic",
        )
        early = [step for step in stochastic if step < self.branching.steps[0]]
        _require(
            not early,
            f"stochastic steps {early} lie before the first of branch_steps = {self.branch_steps}: all samples of a "
            "prompt share them, so nothing tells a good one from a bad one. Branch at the first stochastic step, or "
            "make those steps deterministic",
        )

    def _check_one_step(self) -> None:
        if self.one_step is None:
            return
        _require(self.one_step in ONE_STEP, f"one_step = {self.one_step!r} must be one of {', '.join(ONE_STEP)}")
        where = f"one_step = {self.one_step}"
        _require(self.eta > 0, f"{where} needs stochastic steps. Set eta above 0 (0 = no noise)")
        _require(
            self.keep_latents == "transitions",
            f"{where} stores the ends of each sample's own step. Set keep_latents: transitions",
        )
        _require(self.branch_steps is None, f"{where} and branch_steps = {self.branch_steps} exclude each other")
        if self.sde_indices is not None:
            self._check_shares(self.sde_indices)

    def _check_shares(self, steps: list[int]) -> None:
        """Raise ConfigError unless the samples of a prompt divide over the steps that they branch at."""
        _require(
            self.one_step != "branch" or not steps or self.samples_per_prompt % len(steps) == 0,
            f"samples_per_prompt = {self.samples_per_prompt} does not divide over the {len(steps)} stochastic steps "
            f"{steps}, at each of which equally many samples branch (one_step: branch). Change one of them",
        )

    @property
    def branching(self) -> Branching | None:
        """The tree of a prompt's samples; None where each has its own trajectory. Raises ConfigError if
        `branch_steps` and `branch_factors` do not describe one."""
        if self.branch_steps is None and self.branch_factors is None:
            return None
        return Branching(tuple(self.branch_steps or ()), tuple(self.branch_factors or ()))

    @property
    def samples_made_together(self) -> int:
        """The leaves of a tree."""
        return 1 if self.branching is None else self.branching.num_leaves

    @property
    def is_float32(self) -> bool:
        """True if the model runs without autocast."""
        return self.autocast_precision == "fp32"

    @property
    def uses_guidance(self) -> bool:
        """True if a step needs an unconditional prediction too."""
        return self.guidance_scale > 1

    def resolve_sde_indices(self, rollout_id: int) -> list[int]:
        """The stochastic steps of one rollout, sorted. With eta = 0 there are none; else explicit indices win, then the
        scheduler, then every step.

        Raises ConfigError when the scheduler names a step outside the schedule or one step twice, and where
        trajectories would part at a step that is not stochastic.
        """
        if self.eta == 0:
            return []
        if self.sde_indices is not None:
            return sorted(self.sde_indices)
        if self.scheduler is None:
            every = list(range(self.num_inference_steps))
            self._check_branch_points(every)
            self._check_shares(every)
            return every
        chosen = sorted(self.scheduler.indices(rollout_id))
        wrong = [i for i in chosen if not 0 <= i < self.num_inference_steps]
        _require(
            not wrong,
            f"{type(self.scheduler).__name__} chose steps {wrong} outside 0..{self.num_inference_steps - 1}. "
            "Give it the same number of steps as sampling.num_inference_steps.",
        )
        _require(len(set(chosen)) == len(chosen), f"{type(self.scheduler).__name__} chose a step twice: {chosen}")
        self._check_branch_points(chosen)
        self._check_shares(chosen)
        return chosen

    def resolved(self, rollout_id: int) -> Self:
        """A copy with the stochastic steps of one rollout written down and no scheduler."""
        return dataclasses.replace(self, sde_indices=self.resolve_sde_indices(rollout_id), scheduler=None)


@dataclass(frozen=True, kw_only=True)
class ARSamplingParams(BaseSamplingParams):
    """Sampling of tokens. No default temperature: replay must use the one that rollout used."""

    samples_tokens: ClassVar[bool | None] = True
    temperature: float
    """Logits are divided by it before the softmax, in rollout and replay alike; 0 is greedy and cannot be replayed."""
    max_new_tokens: int = 512
    top_p: float = 1.0
    """Below 1, only the most probable tokens that together reach it are sampled from. For evaluation: replay scores
    under the whole softmax, and refuses a truncated rollout whose log-probs are of another distribution."""
    top_k: int = 0
    """Above 0, only so many tokens are sampled from, as top_p. 0 means no limit."""
    stop_token_ids: tuple[int, ...] = ()
    """End a sample, besides the model's own end-of-sequence ids."""
    guidance_scale: float = 1.0
    """For models that draw images by tokens: tokens are drawn from softmax((u + scale (c - u)) / temperature), c and u
    the logits after the prompt and after an empty one. 1 means no guidance: the model runs once per token."""
    seed: int = 42
    """Base seed of the draws; each sample's own follows from it and the sample's key alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_number("temperature", self.temperature, " (0 = greedy)")
        _require_integer("max_new_tokens", self.max_new_tokens, minimum=1)
        _require_number("top_p", self.top_p)
        _require(0 < self.top_p <= 1, f"top_p = {self.top_p} must lie in (0, 1]")
        _require_integer("top_k", self.top_k, minimum=0)
        _require_number("guidance_scale", self.guidance_scale)
        _require(self.guidance_scale >= 1, f"guidance_scale = {self.guidance_scale} must be at least 1 (no guidance)")
        # Recipes are YAML, which knows lists only.
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _require_integer("a token of stop_token_ids", token, minimum=0)
        _require_integer("seed", self.seed)

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is taken instead of a drawn one."""
        return self.temperature == 0

    @property
    def uses_guidance(self) -> bool:
        """True if a token needs the logits of an empty prompt too."""
        return self.guidance_scale > 1

    @property
    def is_truncated(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, kw_only=True)
class ActionSamplingParams(BaseSamplingParams):
    """Sampling of the actions of a policy in an environment. Which options apply depends on the policy's head."""

    samples_actions: ClassVar[bool] = True
    num_inference_steps: int = 4
    """Steps of a flow-matching head from noise to a chunk of moves."""
    eta: float = 0.5
    """Noise level of its stochastic steps; 0 follows the flow and cannot be replayed. Of a head that learns its noise a
    factor of the deviations, 1 for those that it chose."""
    sde_indices: list[int] | None = None
    """Its stochastic steps; None: every step. Those that are not follow the flow."""
    temperature: float = 1.0
    """For a head with bins: logits are divided by it, in rollout and replay alike; 0 takes the most probable bin and
    cannot be replayed."""
    seed: int = 42
    """Base seed of the draws; each decision's own follows from it, the episode's key and the decision's number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_integer("num_inference_steps", self.num_inference_steps, minimum=1)
        _require_number("eta", self.eta, " (0 = no noise)")
        _require_number("temperature", self.temperature, " (0 = the most probable)")
        _require_integer("seed", self.seed)
        steps = self.sde_indices or []
        for step in steps:
            _require_integer("a step of sde_indices", step, minimum=0)
        wrong = [step for step in steps if step >= self.num_inference_steps]
        _require(not wrong, f"sde_indices {wrong} lie outside 0..{self.num_inference_steps - 1}")
        _require(len(set(steps)) == len(steps), f"sde_indices repeat a step: {steps}")

    @property
    def stochastic_steps(self) -> list[int]:
        """The stochastic steps of a flow, sorted; none with eta = 0."""
        if self.eta == 0:
            return []
        return list(range(self.num_inference_steps)) if self.sde_indices is None else sorted(self.sde_indices)


@dataclass(frozen=True, kw_only=True)
class StagedSamplingParams(BaseSamplingParams):
    """Sampling of several stages, each of its own kind (`unirl.types.stages`)."""

    samples_tokens: ClassVar[bool | None] = None
    samples_per_prompt: int = dataclasses.field(init=False, default=1)
    """Samples of the first stage per prompt, which are the rows of a request; it cannot be set."""
    stages: dict[str, DiffusionSamplingParams | ARSamplingParams]
    """By track, parents first. Of a later stage, `samples_per_prompt` counts samples per sample of its parent."""

    def __post_init__(self) -> None:
        _require(bool(self.stages), "stages is empty; name at least one track")
        object.__setattr__(self, "samples_per_prompt", next(iter(self.stages.values())).samples_per_prompt)
        super().__post_init__()

    @property
    def is_float32(self) -> bool:
        """True if every stage is."""
        return all(params.is_float32 for params in self.stages.values())

    @property
    def samples_made_together(self) -> int:
        """Those of the first stage."""
        return next(iter(self.stages.values())).samples_made_together


SamplingParams = DiffusionSamplingParams | ARSamplingParams | ActionSamplingParams | StagedSamplingParams
