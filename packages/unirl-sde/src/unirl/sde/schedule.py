"""Sigma schedules: T + 1 noise levels from 1 (or .9997) down to exactly 0, float64 inside and float32 outside.

Two conventions exist for a static shift, and published SD3 runs used both (T = 10, shift 3):
    linear     1 .9643 .9231 .8750 .8182 .7500 .6667 .5625 .4286 .2500 0    DanceGRPO, MixGRPO, UniRL
    diffusers  1 .9601 .9133 .8577 .7904 .7073 .6022 .4649 .2780 .0089 0    Flow-GRPO, NFT, the stock SD3 pipeline
The first shifts linspace(1, 0, T + 1) once. The second is what diffusers' `set_timesteps(T)` does: its grid ends at the
already shifted smallest sigma and is shifted again (huggingface/diffusers issue 13243), so the last step is nearly
empty.
"unipc" is the grid of diffusers' UniPC scheduler with flow sigmas (Wan), "linear" to within its last level; "dpm" that
of its DPM-Solver with flow sigmas (Sana), "linear" to within its first, which is .9997. "dynamic" moves the shift with
the resolution, "empirical" with the resolution and the number of steps (FLUX.2). `SigmaSchedule` names the choice once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self, get_args

import torch
from torch import Tensor

from unirl.sde.bounds import Bounds, check_bounds

Convention = Literal["linear", "diffusers", "unipc", "dpm", "dynamic", "empirical"]
TimeShift = Literal["exponential", "linear"]

# Schedulers of diffusers with a setting use_flow_sigmas.
_FLOW_SIGMAS: Mapping[str, Convention] = {"UniPCMultistepScheduler": "unipc", "DPMSolverMultistepScheduler": "dpm"}
# Settings of a diffusers scheduler that change the sigmas in ways this module does not compute.
_UNSUPPORTED_SETTINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas")


def linear_sigmas(num_steps: int, shift: float = 3.0) -> Tensor:
    """linspace(1, 0, T + 1), shifted once: shift t / (1 + (shift - 1) t). [T + 1] float32.

    Equal to diffusers with explicit sigmas = linspace(1, 1/T, T). shift > 0; 1 leaves the grid linear.
    Raises ValueError for a bad num_steps or shift. Source: DanceGRPO (arXiv 2505.07818), MixGRPO (2507.21802).
    """
    return _finished(_linear_grid(num_steps, shift), None, f"linear_sigmas({num_steps}, {shift})")


def diffusers_sigmas(num_steps: int, shift: float = 3.0, num_train_timesteps: int = 1000) -> Tensor:
    """The static schedule of diffusers' FlowMatchEulerDiscreteScheduler.set_timesteps(T). [T + 1] float32.

    Its grid runs from 1 to the shifted 1 / num_train_timesteps and is then shifted again; see the module docstring.
    Raises ValueError for a bad num_steps, shift or num_train_timesteps.
    """
    name = f"diffusers_sigmas({num_steps}, {shift}, {num_train_timesteps})"
    return _finished(_diffusers_grid(num_steps, shift, num_train_timesteps), None, name)


def unipc_sigmas(num_steps: int, shift: float = 3.0, num_train_timesteps: int = 1000) -> Tensor:
    """The schedule of diffusers' UniPCMultistepScheduler with use_flow_sigmas and flow_shift. [T + 1] float32.

    linspace(1, 1 / num_train_timesteps, T + 1) without its end, shifted once, then 0. diffusers lowers the first level
    by 1e-6 to keep its logarithms finite; here it is 1.
    Raises ValueError for a bad num_steps, shift or num_train_timesteps.
    """
    name = f"unipc_sigmas({num_steps}, {shift}, {num_train_timesteps})"
    return _finished(_unipc_grid(num_steps, shift, num_train_timesteps), None, name)


def dpm_sigmas(num_steps: int, shift: float = 3.0, num_train_timesteps: int = 1000) -> Tensor:
    """The schedule of diffusers' DPMSolverMultistepScheduler with use_flow_sigmas and flow_shift. [T + 1] float32.

    linspace(1 - 1 / num_train_timesteps, 0, T + 1), shifted once. Its pipelines still start from pure noise.
    Raises ValueError for a bad num_steps, shift or num_train_timesteps.
    """
    name = f"dpm_sigmas({num_steps}, {shift}, {num_train_timesteps})"
    return _finished(_dpm_grid(num_steps, shift, num_train_timesteps), None, name)


def dynamic_mu(
    image_seq_len: int,
    base_seq_len: int = 256,
    max_seq_len: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> float:
    """The resolution's shift: linear in the number of image tokens, through (base_seq_len, base_shift) and (max_...,
    ...).

    image_seq_len: tokens of one image after patching, (H / 16) (W / 16) for FLUX. Extrapolates outside the two lengths,
    as the pipelines do. The defaults are FLUX.1; Qwen-Image has max_seq_len 8192 and max_shift 0.9.
    """
    if image_seq_len < 1:
        raise ValueError(f"image_seq_len = {image_seq_len} must be at least 1.")
    if base_seq_len == max_seq_len:
        raise ValueError(f"base_seq_len = max_seq_len = {base_seq_len}: two lengths are needed to draw a line.")
    slope = (max_shift - base_shift) / (max_seq_len - base_seq_len)
    return base_shift + slope * (image_seq_len - base_seq_len)


def empirical_mu(image_seq_len: int, num_steps: int) -> float:
    """FLUX.2's shift: lines in the number of tokens were fitted at 10 and at 200 steps, and mu goes straight between.

    Beyond 4300 tokens the line of 200 steps serves any number of steps. Equal to `compute_empirical_mu` of diffusers'
    Flux2Pipeline and Flux2KleinPipeline.
    """
    if image_seq_len < 1:
        raise ValueError(f"image_seq_len = {image_seq_len} must be at least 1.")
    _check_num_steps(num_steps)
    at_200 = 0.00016927 * image_seq_len + 0.45666666
    if image_seq_len > 4300:
        return at_200
    at_10 = 8.73809524e-05 * image_seq_len + 1.89833333
    return at_200 + (at_10 - at_200) * (200 - num_steps) / 190


def dynamic_sigmas(
    num_steps: int, mu: float, time_shift_type: TimeShift = "exponential", shift_terminal: float | None = None
) -> Tensor:
    """linspace(1, 1/T, T), shifted by mu, then 0. [T + 1] float32.

    time_shift_type: "exponential" is e^mu / (e^mu + 1/t - 1), "linear" is mu / (mu + 1/t - 1), which needs mu > 0.
    shift_terminal: if given, the schedule is stretched about 1 so that its last positive sigma has this value
    (Qwen-Image 0.02); needs at least two steps.
    Equal to diffusers' scheduler with use_dynamic_shifting, explicit sigmas linspace(1, 1/T, T) and this mu.
    """
    name = f"dynamic_sigmas({num_steps}, {mu}, {time_shift_type!r}, {shift_terminal})"
    return _finished(_dynamic_grid(num_steps, mu, time_shift_type), shift_terminal, name)


class Schedule(Protocol):
    """Anything that names the noise levels of a trajectory: `SigmaSchedule`, `unirl.sde.timesteps.TimestepSchedule`."""

    def sigmas(self, num_steps: int, image_seq_len: int | None = None) -> Tensor:
        """The T + 1 sigmas, float32, strictly decreasing within [0, 1]."""
        ...


@dataclass(frozen=True)
class SigmaSchedule:
    """A named schedule with its constants; `sigmas` evaluates it for a number of steps and a resolution."""

    convention: Convention = "linear"
    """The static ones of the module docstring, or "dynamic" or "empirical", which follow the resolution."""
    shift: Annotated[float, Bounds(gt=0)] = 3.0
    """Static shift, > 0; unused by "dynamic" and "empirical"."""
    base_shift: Annotated[float, Bounds()] = 0.5
    """mu at base_seq_len; "dynamic" only, as are the three below."""
    max_shift: Annotated[float, Bounds()] = 1.15
    base_seq_len: Annotated[int, Bounds(ge=1)] = 256
    max_seq_len: Annotated[int, Bounds(ge=1)] = 4096
    shift_terminal: Annotated[float, Bounds(gt=0, lt=1)] | None = None
    """Value of the last positive sigma, in (0, 1), by stretching; None leaves the schedule as it is."""
    time_shift_type: TimeShift = "exponential"

    def __post_init__(self) -> None:
        if self.convention not in get_args(Convention):
            raise ValueError(f"convention = {self.convention!r} is not one of {get_args(Convention)}.")
        check_bounds(self)
        _check_time_shift_type(self.time_shift_type)

    def sigmas(self, num_steps: int, image_seq_len: int | None = None) -> Tensor:
        """The T + 1 sigmas, float32, from 1 (about .9997 for "dpm") to exactly 0, strictly decreasing.

        image_seq_len: tokens of one image; required by "dynamic" and "empirical", no influence on the others.
        Raises ValueError if it is missing or a constant makes the schedule impossible.
        """
        name = f"{self}.sigmas({num_steps}, {image_seq_len})"
        if self.convention == "linear":
            grid = _linear_grid(num_steps, self.shift)
        elif self.convention == "diffusers":
            grid = _diffusers_grid(num_steps, self.shift, 1000)
        elif self.convention == "unipc":
            grid = _unipc_grid(num_steps, self.shift, 1000)
        elif self.convention == "dpm":
            grid = _dpm_grid(num_steps, self.shift, 1000)
        elif image_seq_len is None:
            raise ValueError(f"{self} needs image_seq_len: its shift depends on the resolution.")
        else:
            grid = _dynamic_grid(num_steps, self._mu(num_steps, image_seq_len), self.time_shift_type)
        return _finished(grid, self.shift_terminal, name)

    def _mu(self, num_steps: int, image_seq_len: int) -> float:
        if self.convention == "empirical":
            return empirical_mu(image_seq_len, num_steps)
        return dynamic_mu(image_seq_len, self.base_seq_len, self.max_seq_len, self.base_shift, self.max_shift)

    # The values of a JSON file: numbers, booleans, strings and null, told apart key by key.
    @classmethod
    def from_scheduler_config(cls, config: Mapping[str, Any], convention: Convention | None = None) -> Self:
        """The schedule of a checkpoint's `scheduler_config.json`, given as a mapping.

        convention: None takes "dynamic" if the file says use_dynamic_shifting, "unipc" or "dpm" for a UniPC or
        DPM-Solver scheduler with flow sigmas, and "linear" otherwise; the stock pipeline of any other static checkpoint
        is "diffusers". Missing constants of the dynamic shift take diffusers' defaults.
        Raises ValueError if a static convention finds neither `shift` nor `flow_shift`, or the file asks for Karras,
        exponential, beta or inverted sigmas.
        """
        unsupported = [name for name in _UNSUPPORTED_SETTINGS if config.get(name)]
        if unsupported:
            raise ValueError(f"the scheduler config sets {unsupported}, which no sigma schedule here reproduces.")
        if convention is None:
            by_class = _FLOW_SIGMAS.get(config.get("_class_name", "")) if config.get("use_flow_sigmas") else None
            convention = "dynamic" if config.get("use_dynamic_shifting") else by_class or "linear"
        shift = config.get("shift", config.get("flow_shift"))
        if shift is None:
            if convention not in ("dynamic", "empirical"):
                raise ValueError(f"the scheduler config has neither shift nor flow_shift: {sorted(config)}.")
            shift = 1.0
        return cls(
            convention=convention,
            shift=shift,
            base_shift=config.get("base_shift", 0.5),
            max_shift=config.get("max_shift", 1.15),
            base_seq_len=config.get("base_image_seq_len", 256),
            max_seq_len=config.get("max_image_seq_len", 4096),
            shift_terminal=config.get("shift_terminal") or None,
            time_shift_type=config.get("time_shift_type", "exponential"),
        )


def compressed_tail(sigmas: Tensor, start: int, ratio: float) -> Tensor:
    """The schedule with fewer levels from position `start` on: n + 1 become int((n + 1) ratio), both ends kept.

    sigmas: [T + 1]. So n steps become int((n + 1) ratio) - 1, and at least one. The levels that stay are taken from the
    schedule, evenly by index. Raises ValueError unless 0 <= start < T and 0 < ratio <= 1.
    Source: the code of MixGRPO-Flash (arXiv 2507.21802), which counts levels, not steps: of 25 steps with a window of
    four, 0.4 leaves 11. It spaces them evenly before the shift, which is the same where the steps divide, and does
    not reach 0 where one level is left.
    """
    last = sigmas.numel() - 1
    if not 0 <= start < last or not 0 < ratio <= 1:
        raise ValueError(f"start = {start} must lie in 0 .. {last - 1}, ratio = {ratio} in (0, 1].")
    num_tail = max(int((last - start + 1) * ratio + 1e-9) - 1, 1)
    tail = [start + round(step * (last - start) / num_tail) for step in range(num_tail + 1)]
    return sigmas[[*range(start), *tail]]


def _shifted(t: Tensor, shift: float) -> Tensor:
    return shift * t / (1 + (shift - 1) * t)


def _linspace(start: float, end: float, count: int) -> Tensor:
    return torch.linspace(start, end, count, dtype=torch.float64, device="cpu")


def _linear_grid(num_steps: int, shift: float) -> Tensor:
    _check_num_steps(num_steps)
    _check_shift(shift)
    return _shifted(_linspace(1, 0, num_steps + 1)[:-1], shift)


def _diffusers_grid(num_steps: int, shift: float, num_train_timesteps: int) -> Tensor:
    _check_num_steps(num_steps)
    _check_shift(shift)
    _check_train_timesteps(num_train_timesteps)
    smallest = shift / (num_train_timesteps + shift - 1)
    return _shifted(_linspace(1, smallest, num_steps), shift)


def _unipc_grid(num_steps: int, shift: float, num_train_timesteps: int) -> Tensor:
    _check_num_steps(num_steps)
    _check_shift(shift)
    _check_train_timesteps(num_train_timesteps)
    return _shifted(_linspace(1, 1 / num_train_timesteps, num_steps + 1)[:-1], shift)


def _dpm_grid(num_steps: int, shift: float, num_train_timesteps: int) -> Tensor:
    _check_num_steps(num_steps)
    _check_shift(shift)
    _check_train_timesteps(num_train_timesteps)
    return _shifted(_linspace(1 - 1 / num_train_timesteps, 0, num_steps + 1)[:-1], shift)


def _dynamic_grid(num_steps: int, mu: float, time_shift_type: TimeShift) -> Tensor:
    _check_num_steps(num_steps)
    _check_time_shift_type(time_shift_type)
    if not math.isfinite(mu) or (time_shift_type == "linear" and mu <= 0):
        raise ValueError(f"mu = {mu} must be finite, and positive for the linear time shift ({time_shift_type=}).")
    weight = math.exp(mu) if time_shift_type == "exponential" else mu
    return weight / (weight + (1 / _linspace(1, 1 / num_steps, num_steps) - 1))


def _finished(grid: Tensor, shift_terminal: float | None, name: str) -> Tensor:
    """`grid` (T values) stretched to the terminal, with the final 0, checked, in float32."""
    _check_shift_terminal(shift_terminal)
    if shift_terminal is not None:
        if len(grid) < 2:
            raise ValueError(f"{name}: shift_terminal = {shift_terminal} needs at least 2 steps, got {len(grid)}.")
        grid = 1 - (1 - grid) * (1 - shift_terminal) / (1 - grid[-1])
    sigmas = torch.cat([grid, torch.zeros(1, dtype=torch.float64, device="cpu")]).float()
    if not bool((sigmas.diff() < 0).all()):
        raise ValueError(f"{name} is not strictly decreasing in float32: {sigmas.tolist()}. Use fewer steps.")
    return sigmas


def _check_num_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"num_steps = {num_steps} must be at least 1.")


def _check_train_timesteps(num_train_timesteps: int) -> None:
    if num_train_timesteps < 2:
        raise ValueError(f"num_train_timesteps = {num_train_timesteps} must be at least 2.")


def _check_shift(shift: float) -> None:
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"shift = {shift} must be finite and positive; 1 means no shift.")


def _check_time_shift_type(time_shift_type: TimeShift) -> None:
    if time_shift_type not in get_args(TimeShift):
        raise ValueError(f"time_shift_type = {time_shift_type!r} is not one of {get_args(TimeShift)}.")


def _check_shift_terminal(shift_terminal: float | None) -> None:
    if shift_terminal is not None and not 0 < shift_terminal < 1:
        raise ValueError(f"shift_terminal = {shift_terminal} must lie in (0, 1), or be None.")
