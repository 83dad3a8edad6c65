"""Rollouts whose samples walk their first steps together, until a step that is chosen for each rollout anew."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.config import instantiate
from unirl.config.runs import ComposedRun
from unirl.types.sampling import DiffusionSamplingParams

MOST_ROLLOUTS = 1000
"""Rollouts that are looked at."""


@dataclass(frozen=True)
class Branching:
    """Rollouts that part at different steps: what they compute grows evenly with the steps behind that."""

    earliest: int
    """A rollout whose samples part as early as any."""
    latest: int
    share: float
    """Where the mean of all rollouts lies: 0 is the earliest one, 1 the latest one."""


def branching_of(run: ComposedRun) -> Branching | None:
    """That of the first stage whose samples part at different steps; None where they always part at the same one."""
    numbers = range(min(run.file.num_rollouts, MOST_ROLLOUTS))
    for stage in run.stages:
        params = instantiate(stage.sampling.node)
        if not isinstance(params, DiffusionSamplingParams) or not params.init_same_noise:
            continue
        firsts = [min(params.resolve_sde_indices(number)) for number in numbers]
        low, high = min(firsts), max(firsts)
        if low < high:
            mean = sum(firsts) / len(firsts)
            return Branching(firsts.index(low), firsts.index(high), (mean - low) / (high - low))
    return None
