"""Classifier-free guidance over rows, in ONE forward of [unconditional rows, conditional rows].

v = v_uncond + scale (v_cond - v_uncond), in float32. Whether a row is guided is decided row by row, because a batched
replay mixes steps and an interval guides only some of them; a row that is not guided costs no extra forward.
Source: Ho and Salimans (arXiv 2207.12598); the interval is Kynkaanniemi et al. (arXiv 2404.07724).
Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from unirl.models.adapter import num_rows as count_rows
from unirl.models.adapter import select_rows
from unirl.models.guidance_rules import guidance_problem, input_problem
from unirl.sde.loop import Velocity
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

INTERVAL_KEY = "guidance_interval"
"""Name in `sampler_kwargs` of the two sigmas between which rows are guided."""


@dataclass(frozen=True)
class Guidance:
    """How strongly, and at which noise levels, rows are guided."""

    scale: float
    """At most 1 means no guidance, as in diffusers."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Rows with low <= sigma <= high are guided; the others take the conditional velocity."""
    boundary: float = 0.0
    """Noise level of a row below which `scale_below` holds instead."""
    scale_below: float | None = None
    """None: `scale` for all."""

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 0 <= low < high <= 1:
            raise ConfigError(f"{INTERVAL_KEY} = {self.interval} must be [low, high] with 0 <= low < high <= 1")

    @classmethod
    def from_params(cls, params: DiffusionSamplingParams) -> Self:
        """The guidance that sampling parameters ask for, its interval from `sampler_kwargs`."""
        interval = params.sampler_kwargs.get(INTERVAL_KEY, (0.0, 1.0))
        if not isinstance(interval, (list, tuple)) or len(interval) != 2:
            raise ConfigError(f"sampler_kwargs.{INTERVAL_KEY} = {interval!r} must be two sigmas [low, high]")
        return cls(scale=params.guidance_scale, interval=(float(interval[0]), float(interval[1])))

    @property
    def is_on(self) -> bool:
        """True if any row can be guided."""
        return self.scale > 1

    def combined(
        self, cond_R: Tensor, uncond_R: Tensor, sigma_R: Tensor, combine: Callable[[Tensor, Tensor, float], Tensor]
    ) -> Tensor:
        """combine(conditional, unconditional, scale) with the scale of each row's noise level."""
        above = combine(cond_R, uncond_R, self.scale)
        if self.scale_below is None:
            return above
        is_below = (sigma_R < self.boundary).view(-1, *(1 for _ in cond_R.shape[1:]))
        return torch.where(is_below, combine(cond_R, uncond_R, self.scale_below), above)

    def guided_rows(self, sigma_R: Tensor) -> list[int] | None:
        """Which rows are guided; None means all. Reads `sigma_R` from its device only where there is an interval."""
        if not self.is_on:
            return []
        low, high = self.interval
        if (low, high) == (0.0, 1.0):
            return None
        inside = [low <= sigma <= high for sigma in sigma_R.tolist()]
        return None if all(inside) else [row for row, is_inside in enumerate(inside) if is_inside]


def require_negative_prompt(params: DiffusionSamplingParams) -> str:
    """The negative prompt of guided sampling. Raises ConfigError if there is none: zeros would be another model."""
    if params.negative_prompt is None:
        raise ConfigError(
            f"guidance_scale = {params.guidance_scale} needs a negative prompt. "
            'Set sampling.negative_prompt (the empty string "" is a valid one) or sampling.guidance_scale: 1.'
        )
    return params.negative_prompt


def check_distilled_guidance(params: DiffusionSamplingParams, family: str, *, takes: bool, released: float) -> None:
    """Raises ConfigError if a checkpoint takes its guidance as an input and gets none, or the other way round.

    takes: whether the transformer embeds it. released: the scale that the checkpoint was published with.
    """
    checkpoint = f"this {family} checkpoint"
    problem = input_problem(params.distilled_guidance_scale, checkpoint, takes=takes, released=released)
    if problem is not None:
        raise ConfigError(problem)


def refuse_guidance(params: DiffusionSamplingParams, checkpoint: str, instead: str) -> None:
    """Raises ConfigError if a checkpoint that is distilled to sample without guidance is asked for some.

    instead: which checkpoint to use for it.
    """
    problem = guidance_problem(params.guidance_scale, params.negative_prompt, checkpoint, instead)
    if problem is not None:
        raise ConfigError(problem)


def extrapolate(cond_R: Tensor, uncond_R: Tensor, scale: float) -> Tensor:
    """v_uncond + scale (v_cond - v_uncond), elementwise."""
    return uncond_R + scale * (cond_R - uncond_R)


def classifier_free(
    predict: Callable[[Tensor, Tensor, Conditions], Tensor],
    conditional: Conditions,
    unconditional: Conditions | None,
    guidance: Guidance,
    *,
    combine: Callable[[Tensor, Tensor, float], Tensor] = extrapolate,
) -> Velocity:
    """The guided velocity of R rows, one call of `predict` a step.

    predict(x [R', ...], sigma [R'], conditions of R' rows) -> velocity [R', ...]; R' is R, plus one row for each guided
    row, placed first.
    conditional: one row per row of x in every slot. unconditional: the slots that differ without the prompt, of the
    same kinds; a slot it leaves out (a reference image) is the same in both.
    combine(conditional, unconditional, scale) -> float32 of guided rows alone, for families that rescale the result.
    Raises ContractError if guidance is on and `unconditional` is absent, names another slot or has another size.
    """
    if not guidance.is_on:

        def plain(x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
            del step_R
            return predict(x_R, sigma_R, conditional).float()

        return plain
    num_rows = count_rows(conditional)
    sizes = {name: condition.batch_size for name, condition in (unconditional or {}).items()}
    if not unconditional or set(sizes) - set(conditional) or set(sizes.values()) != {num_rows}:
        raise ContractError(
            f"guidance {guidance.scale} needs one unconditional row per conditional row, in slots of the conditional "
            f"ones: {num_rows} conditional rows of {sorted(conditional)}, unconditional {sizes or None}"
        )
    without = {**conditional, **unconditional}
    everything = {name: type(value).concat([without[name], value]) for name, value in conditional.items()}

    def guided(x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        del step_R
        rows = guidance.guided_rows(sigma_R)
        if rows == []:
            return predict(x_R, sigma_R, conditional).float()
        if rows is None:
            both = predict(torch.cat([x_R, x_R]), torch.cat([sigma_R, sigma_R]), everything).float()
            uncond, cond = both.split([num_rows, num_rows])
            return guidance.combined(cond, uncond, sigma_R, combine)
        index = torch.tensor(rows, device=x_R.device)
        chosen = select_rows(everything, [*rows, *range(num_rows, 2 * num_rows)])
        both = predict(torch.cat([x_R[index], x_R]), torch.cat([sigma_R[index], sigma_R]), chosen).float()
        uncond, cond = both.split([len(rows), num_rows])
        return cond.index_copy(0, index, guidance.combined(cond[index], uncond, sigma_R[index], combine))

    return guided
