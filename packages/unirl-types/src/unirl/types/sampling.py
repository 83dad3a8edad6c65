"""How a batch is sampled: everything that replay must repeat."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from unirl.types.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS = ("fp32", "bf16", "fp16")


class IndexScheduler(Protocol):
    """Chooses the stochastic steps of a rollout. `unirl.sde.windows` has the usual ones."""

    def indices(self, rollout_id: int) -> list[int]:
        """Sorted step indices; the same in every process."""
        ...


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class BaseSamplingParams:
    """What every kind of sampling has."""

    samples_per_prompt: int = 1

    def __post_init__(self) -> None:
        _require(self.samples_per_prompt >= 1, f"samples_per_prompt = {self.samples_per_prompt} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class DiffusionSamplingParams(BaseSamplingParams):
    """Sampling of an image or video by a flow-matching model."""

    num_inference_steps: int = 50
    guidance_scale: float = 7.5
    """1 means no guidance: the model runs once a step."""
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
    """Whether the samples of a group share their initial noise."""
    eta: float = 1.0
    """Noise level of the stochastic steps; 0 is deterministic sampling. Its range depends on the kernel."""
    sde_strategy: str | None = None
    """Name of the kernel, stamped on the request so that an engine with another kernel refuses."""
    scheduler: IndexScheduler | None = None
    """Chooses the stochastic steps of each rollout. Resolved by the driver and then dropped."""
    sde_indices: list[int] | None = None
    """The stochastic steps. Wins over `scheduler`; with neither, every step is stochastic."""
    post_solver: Literal["euler", "dpmpp_2m"] = "euler"
    """Solver of the deterministic steps; dpmpp_2m only where no stochastic step follows."""
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
        _require(steps >= 1, f"num_inference_steps = {steps} must be at least 1")
        for name in ("height", "width", "num_frames"):
            _require(getattr(self, name) >= 1, f"{name} = {getattr(self, name)} must be at least 1")
        _require(
            math.isfinite(self.eta) and self.eta >= 0, f"eta = {self.eta} must be finite and at least 0 (0 = no noise)"
        )
        _require(
            math.isfinite(self.guidance_scale) and self.guidance_scale >= 0,
            f"guidance_scale = {self.guidance_scale} must be finite and at least 0",
        )
        if self.sde_indices is not None:
            wrong = [i for i in self.sde_indices if not 0 <= i < steps]
            _require(not wrong, f"sde_indices {wrong} lie outside 0..{steps - 1} (num_inference_steps = {steps})")
            _require(
                len(set(self.sde_indices)) == len(self.sde_indices), f"sde_indices repeat a step: {self.sde_indices}"
            )
        for name in ("autocast_precision", "trajectory_precision", "logprob_precision"):
            value = getattr(self, name)
            _require(value in PRECISIONS, f"{name} = {value!r} must be one of {', '.join(PRECISIONS)}")
        repeated = sorted(set(self.sampler_kwargs) & {field.name for field in dataclasses.fields(self)})
        _require(not repeated, f"sampler_kwargs repeats declared fields {repeated}; set those directly")

    @property
    def uses_guidance(self) -> bool:
        """Whether a step needs an unconditional prediction too."""
        return self.guidance_scale > 1

    def resolve_sde_indices(self, rollout_id: int) -> list[int]:
        """The stochastic steps of one rollout, sorted. Explicit indices win, then the scheduler, then every step.

        Raises ConfigError when the scheduler names a step outside the schedule.
        """
        if self.eta == 0:
            return []
        if self.sde_indices is not None:
            return sorted(self.sde_indices)
        if self.scheduler is None:
            return list(range(self.num_inference_steps))
        chosen = sorted(self.scheduler.indices(rollout_id))
        wrong = [i for i in chosen if not 0 <= i < self.num_inference_steps]
        _require(
            not wrong,
            f"{type(self.scheduler).__name__} chose steps {wrong} outside 0..{self.num_inference_steps - 1}. "
            "Give it the same number of steps as sampling.num_inference_steps.",
        )
        return chosen

    def resolved(self, rollout_id: int) -> Self:
        """A copy with the stochastic steps of one rollout written down and no scheduler."""
        return dataclasses.replace(self, sde_indices=self.resolve_sde_indices(rollout_id), scheduler=None)


@dataclass(frozen=True, kw_only=True)
class ARSamplingParams(BaseSamplingParams):
    """Sampling of tokens. No default temperature: replay must use the one that rollout used."""

    temperature: float
    max_new_tokens: int = 512
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.temperature >= 0, f"temperature = {self.temperature} must be at least 0")
        _require(0 < self.top_p <= 1, f"top_p = {self.top_p} must lie in (0, 1]")
        _require(self.max_new_tokens >= 1, f"max_new_tokens = {self.max_new_tokens} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ComposedSamplingParams(BaseSamplingParams):
    """Text first, then images of each text. samples_per_prompt is the product of the two."""

    diffusion: DiffusionSamplingParams
    ar: ARSamplingParams

    def __post_init__(self) -> None:
        product = self.ar.samples_per_prompt * self.diffusion.samples_per_prompt
        object.__setattr__(self, "samples_per_prompt", product)
        super().__post_init__()


SamplingParams = DiffusionSamplingParams | ARSamplingParams | ComposedSamplingParams
