"""Schedules of variance-preserving models: integer timesteps of a table of betas, as sigmas of flow matching.

A checkpoint of DDPM, DDIM or CogVideoX names the betas it was trained with. The table of all its noise levels follows,
a schedule is T of them and the end, and a model that takes integer timesteps is asked nowhere else. float64 inside,
float32 outside. Sources: DDIM (arXiv 2010.02502); zero terminal SNR and the spacings arXiv 2305.08891; CogVideoX's
shift of the signal-to-noise ratio arXiv 2408.06072. Shape letters: see `unirl.sde`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, get_args

import torch
from torch import Tensor

from unirl.sde.bounds import Bounds, check_bounds
from unirl.sde.variance_preserving import sigma_of

BetaSchedule = Literal["linear", "scaled_linear"]
Spacing = Literal["leading", "trailing", "linspace"]

_NEEDED_SETTINGS = ("beta_schedule", "beta_start", "beta_end", "timestep_spacing")
# Settings of diffusers' schedulers that change the step or its noise levels in ways this package does not compute.
_UNSUPPORTED_SETTINGS = (
    "clip_sample",
    "thresholding",
    "trained_betas",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
)
# A sigma on the table may have been through another device; neighbours of a table of 1000 are 1e-5 apart and more.
_SAME_SIGMA = 1e-6


@dataclass(frozen=True)
class TimestepSchedule:
    """The noise levels of a table of betas; `sigmas` picks T of them.

    Equal to diffusers' DDIMScheduler and CogVideoXDDIMScheduler wherever those go from each timestep of theirs to the
    next one: they go to t - num_train_timesteps // T instead, which is the next one for "leading", and for the others
    where T divides num_train_timesteps. Here every step ends where the next begins.
    """

    beta_schedule: BetaSchedule = "scaled_linear"
    """"linear": linspace of beta; "scaled_linear": of its square root (Stable Diffusion, SDXL, CogVideoX)."""
    beta_start: Annotated[float, Bounds(gt=0, lt=1)] = 0.00085
    beta_end: Annotated[float, Bounds(gt=0, lt=1)] = 0.012
    num_train_timesteps: Annotated[int, Bounds(ge=2)] = 1000
    timestep_spacing: Spacing = "leading"
    """"leading": multiples of num_train_timesteps // T, plus steps_offset; "trailing": down from the last timestep;
    "linspace": evenly from the last to 0, rounded."""
    steps_offset: Annotated[int, Bounds(ge=0)] = 0
    """Added to the timesteps of "leading" (SDXL 1); unused by the others."""
    rescale_betas_zero_snr: bool = False
    """True if the last timestep is moved to pure noise (CogVideoX)."""
    snr_shift_scale: Annotated[float, Bounds(gt=0)] = 1.0
    """Divides the signal-to-noise ratio of every level (CogVideoX-2B 3); 1 leaves it."""
    set_alpha_to_one: bool = True
    """True if the last step ends without noise, at sigma = 0, as the stock pipelines of SDXL and CogVideoX do and
    UniRL's trainer needs; otherwise it ends at the level of timestep 0."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("beta_schedule", self.beta_schedule, get_args(BetaSchedule)),
            ("timestep_spacing", self.timestep_spacing, get_args(Spacing)),
        ):
            if value not in known:
                raise ValueError(f"{name} = {value!r} is not one of {known}.")
        check_bounds(self)
        if self.beta_end < self.beta_start:
            raise ValueError(f"beta_start = {self.beta_start} must not exceed beta_end = {self.beta_end}.")

    def alphas_cumprod(self) -> Tensor:
        """abar of every timestep, [num_train_timesteps] float64, decreasing."""
        return _alphas_cumprod(
            self.beta_schedule,
            self.beta_start,
            self.beta_end,
            self.num_train_timesteps,
            self.rescale_betas_zero_snr,
            self.snr_shift_scale,
        ).clone()

    def table(self) -> Tensor:
        """sigma of every timestep, [num_train_timesteps] float32, increasing."""
        return sigma_of(self.alphas_cumprod()).float()

    def timesteps(self, num_steps: int) -> Tensor:
        """The T timesteps of a schedule, [T] int64, decreasing. Raises ValueError if the spacing has no such T."""
        total = self.num_train_timesteps
        if not 1 <= num_steps <= total:
            raise ValueError(f"num_steps = {num_steps} must lie in 1 .. num_train_timesteps = {total}.")
        if self.timestep_spacing == "leading":
            steps = [index * (total // num_steps) + self.steps_offset for index in reversed(range(num_steps))]
        elif self.timestep_spacing == "trailing":
            steps = [round(total - index * (total / num_steps)) - 1 for index in range(num_steps)]
        else:
            gap = (total - 1) / max(num_steps - 1, 1)
            steps = [round(index * gap) for index in reversed(range(num_steps))]
        if steps[0] >= total or not all(earlier > later for earlier, later in pairwise(steps)):
            raise ValueError(
                f"{self} has no {num_steps} timesteps: {steps[:3]} ... must decrease from {total - 1} at most. "
                "Use fewer steps, or a smaller steps_offset."
            )
        return torch.tensor(steps, dtype=torch.int64, device="cpu")

    def sigmas(self, num_steps: int, image_seq_len: int | None = None) -> Tensor:
        """The T + 1 sigmas, float32, strictly decreasing to 0, or to the first level where `set_alpha_to_one` is off.

        image_seq_len: no influence; the levels do not depend on the resolution.
        """
        del image_seq_len
        table = self.table()
        end = torch.zeros(1, device="cpu") if self.set_alpha_to_one else table[:1]
        sigmas = torch.cat([table[self.timesteps(num_steps)], end])
        if not bool((sigmas.diff() < 0).all()):
            raise ValueError(
                f"{self}.sigmas({num_steps}) does not decrease at its end, {sigmas[-2:].tolist()}: timestep 0 is the "
                "last level already. Set set_alpha_to_one, or use fewer steps."
            )
        return sigmas

    def timestep_of(self, sigma_R: Tensor) -> Tensor:
        """The timestep whose level this is, [R] int64, on the device of sigma_R.

        Raises ValueError for a sigma that is not on the table: the model was trained at integer timesteps alone.
        """
        table = self.table().to(sigma_R.device)
        distance_R, timestep_R = (sigma_R.float()[:, None] - table).abs().min(dim=1)
        if bool((distance_R > _SAME_SIGMA).any()):
            wrong = sigma_R[distance_R > _SAME_SIGMA][:4].tolist()
            raise ValueError(
                f"sigmas {wrong} are not levels of the model's {self.num_train_timesteps} timesteps, which lie in "
                f"[{table[0].item():.6f}, {table[-1].item():.6f}]. Take sigmas from its own schedule "
                "(timestep_sampler: rollout)."
            )
        return timestep_R

    # The values of a JSON file: numbers, booleans, strings and null, told apart key by key.
    @classmethod
    def from_scheduler_config(cls, config: Mapping[str, Any], set_alpha_to_one: bool | None = None) -> Self:
        """The schedule of a checkpoint's `scheduler_config.json`, given as a mapping.

        set_alpha_to_one: None takes the file's. SDXL's says false, which its stock scheduler, Euler, does not read.
        Raises ValueError if the file names no betas, or asks for clipping, thresholding, trained betas or other
        sigmas.
        """
        missing = [name for name in _NEEDED_SETTINGS if name not in config]
        unsupported = [name for name in _UNSUPPORTED_SETTINGS if config.get(name)]
        if missing or unsupported:
            raise ValueError(
                f"the scheduler config lacks {missing} and sets {unsupported}: a schedule of timesteps needs the first "
                "and reproduces none of the second."
            )
        stated = bool(config.get("set_alpha_to_one", True))
        return cls(
            beta_schedule=config["beta_schedule"],
            beta_start=config["beta_start"],
            beta_end=config["beta_end"],
            num_train_timesteps=config.get("num_train_timesteps", 1000),
            timestep_spacing=config["timestep_spacing"],
            steps_offset=config.get("steps_offset", 0),
            rescale_betas_zero_snr=config.get("rescale_betas_zero_snr", False),
            snr_shift_scale=config.get("snr_shift_scale", 1.0),
            set_alpha_to_one=stated if set_alpha_to_one is None else set_alpha_to_one,
        )


@lru_cache(maxsize=16)
def _alphas_cumprod(
    beta_schedule: BetaSchedule, start: float, end: float, count: int, is_zero_snr: bool, snr_shift_scale: float
) -> Tensor:
    power = 2 if beta_schedule == "scaled_linear" else 1
    roots = torch.linspace(start ** (1 / power), end ** (1 / power), count, dtype=torch.float64, device="cpu")
    kept = (1 - roots**power).cumprod(0)
    kept = kept / (snr_shift_scale + (1 - snr_shift_scale) * kept)
    if is_zero_snr:  # sqrt(abar) moved so that the last is 0, scaled so that the first stays
        root = kept.sqrt()
        kept = ((root - root[-1]) * (root[0] / (root[0] - root[-1]))).square()
    return kept
