"""From comparisons of two samples to a number per sample. Pure functions of numbers.

Legend: n samples of a group, p comparisons. `pairs` are rows (first, second) of a group; `wins` the probability that
the first of each is the better one, in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from unirl.types.errors import ContractError

Pair = tuple[int, int]
Ranking = Literal["win_rate", "bradley_terry"]

PRIOR = 0.1
"""Weight of the prior that keeps strengths finite where a sample wins or loses every comparison."""
_MAX_STEPS = 100
_TOLERANCE = 1e-10


def pairs_to_compare(num_samples: int, opponents: int | None) -> list[Pair]:
    """The comparisons of a group, each sample in as many of them as any other.

    opponents: comparisons per sample, an even number: with its neighbours on a ring. None, or as many as there are
    others: every pair once. A sample comes first in half of its comparisons, one more or less, so that a judge that
    favours the first image favours none.
    Raises ContractError for fewer than two samples.
    """
    if num_samples < 2:
        raise ContractError(f"a group of {num_samples} sample has nothing to compare; it needs at least 2")
    if opponents is None or opponents >= num_samples - 1:
        return [(i, j) if (i + j) % 2 else (j, i) for j in range(num_samples) for i in range(j)]
    return [(i, (i + step) % num_samples) for step in range(1, opponents // 2 + 1) for i in range(num_samples)]


def win_rates(num_samples: int, pairs: Sequence[Pair], wins: Sequence[float]) -> list[float]:
    """Mean of each sample's wins over its comparisons, in [0, 1]; NaN for a sample without one.

    The mean over a group is 1/2 where all samples have equally many comparisons.
    Source: Pref-GRPO (arXiv 2508.20751), win rate as the reward.
    """
    totals, counts = [0.0] * num_samples, [0] * num_samples
    for (first, second), win in zip(pairs, wins, strict=True):
        totals[first] += win
        totals[second] += 1 - win
        counts[first] += 1
        counts[second] += 1
    return [total / count if count else math.nan for total, count in zip(totals, counts, strict=True)]


def bradley_terry(
    num_samples: int, pairs: Sequence[Pair], wins: Sequence[float], *, prior: float = PRIOR
) -> list[float]:
    """Strengths s of which P(i is better than j) = sigmoid(s_i - s_j) fits the comparisons best; their mean is 0.

    Maximises sum of win * log sigmoid(s_first - s_second) + (1 - win) * log sigmoid(s_second - s_first) less
    prior / 2 * |s|^2, by Newton's method in float64. NaN for a sample without a comparison.
    Source: Bradley and Terry, Rank Analysis of Incomplete Block Designs, 1952.
    """
    first_p = torch.tensor([pair[0] for pair in pairs], dtype=torch.long)
    second_p = torch.tensor([pair[1] for pair in pairs], dtype=torch.long)
    design_pn = torch.zeros(len(pairs), num_samples, dtype=torch.float64)
    rows_p = torch.arange(len(pairs))
    design_pn[rows_p, first_p], design_pn[rows_p, second_p] = 1.0, -1.0
    wins_p, strengths_n = torch.tensor(wins, dtype=torch.float64), torch.zeros(num_samples, dtype=torch.float64)
    for _ in range(_MAX_STEPS):
        expected_p = (design_pn @ strengths_n).sigmoid()
        slope_n = design_pn.T @ (wins_p - expected_p) - prior * strengths_n
        curvature_nn = design_pn.T @ ((expected_p * (1 - expected_p))[:, None] * design_pn)
        step_n = torch.linalg.solve(curvature_nn + prior * torch.eye(num_samples, dtype=torch.float64), slope_n)
        # A step of more than two units would overshoot where the first one is far from the fit.
        strengths_n = strengths_n + step_n.clamp(-2, 2)
        if float(step_n.abs().max()) < _TOLERANCE:
            break
    is_compared = design_pn.abs().sum(dim=0) > 0
    return torch.where(is_compared, strengths_n - strengths_n.mean(), math.nan).tolist()
