"""Curves as a page draws them: smoothed, of several seeds as a band, and no more points than pixels.

Legend: N points, R runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]
"""Steps (int) and values (float), equally many; values may be nan and infinite."""


def smoothed(values_N: np.ndarray, weight: float) -> np.ndarray:
    """Exponential moving average without the pull of its start: y_i = sum_j w^(i-j) x_j / sum_j w^(i-j).

    weight: w, from 0 (the values themselves) to below 1. What is not finite stays as it is and adds nothing.
    """
    if weight <= 0:
        return values_N
    total, norm, found = 0.0, 0.0, []
    for value in values_N.tolist():
        if value - value == 0:  # finite
            total, norm = total * weight + value, norm * weight + 1
            value = total / norm
        found.append(value)
    return np.asarray(found)


@dataclass(frozen=True)
class Drawn:
    """Curves on common steps. Where a curve has no value there, nan."""

    x: np.ndarray
    y: list[np.ndarray]
    """[N] per curve."""


def drawn(curves: Sequence[Curve], num_points: int) -> Drawn:
    """Curves on common steps, at most about `num_points`, that look like all their points.

    Where all steps together are fewer, the curves themselves. Else steps are cut into equal stretches, and each curve
    has its least and its largest value of a stretch, in their order, at the stretch's start and middle: no peak is
    lost, and no point moves by more than a stretch.
    """
    own = [one_per_step(curve) for curve in curves]
    steps = _all_steps(own)
    if len(steps) <= num_points:
        return Drawn(steps, [_on_steps(curve, steps) for curve in own])
    edges = np.linspace(steps[0], steps[-1] + 1, max(1, num_points // 2) + 1)
    x = np.column_stack([edges[:-1], (edges[:-1] + edges[1:]) / 2]).ravel()
    return Drawn(x, [_extremes(curve, edges) for curve in own])


def _all_steps(curves: Sequence[Curve]) -> np.ndarray:
    """Steps that any curve has; each curve has its own in order."""
    if not curves:
        return np.zeros(0)
    longest = max((curve[0] for curve in curves), key=len)
    others = [steps for steps, _ in curves if not _is_head(steps, longest)]
    return np.unique(np.concatenate([longest, *others])) if others else longest


def _is_head(steps: np.ndarray, longest: np.ndarray) -> bool:
    """True for the steps of a run that is the same as another but shorter, as nearly all are."""
    return bool((steps == longest[: len(steps)]).all())


def _on_steps(curve: Curve, steps: np.ndarray) -> np.ndarray:
    values = np.full(len(steps), np.nan)
    values[np.searchsorted(steps, curve[0])] = curve[1]
    return values


def _extremes(curve: Curve, edges: np.ndarray) -> np.ndarray:
    """Two values per stretch: the extremes in their order, or the only value and nan."""
    found = np.full(2 * (len(edges) - 1), np.nan)
    is_finite = np.isfinite(curve[1])
    steps, values = curve[0][is_finite], curve[1][is_finite]
    if not len(steps):
        return found
    stretch = np.searchsorted(edges, steps, side="right") - 1
    starts = np.flatnonzero(np.diff(stretch, prepend=-1))
    sizes = np.diff(starts, append=len(steps))
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    places = np.arange(len(values))
    first_low = np.minimum.reduceat(np.where(values == np.repeat(low, sizes), places, len(values)), starts)
    first_high = np.minimum.reduceat(np.where(values == np.repeat(high, sizes), places, len(values)), starts)
    at = 2 * stretch[starts]
    found[at] = np.where(first_low <= first_high, low, high)
    found[at + 1] = np.where(sizes > 1, np.where(first_low <= first_high, high, low), np.nan)
    return found


def one_per_step(curve: Curve) -> Curve:
    """The last value of every step, by step."""
    steps, values = curve
    if bool((steps[1:] > steps[:-1]).all()):
        return curve
    unique, first_from_the_end = np.unique(steps[::-1], return_index=True)
    return unique, values[::-1][first_from_the_end]


def band(curves: Sequence[Curve]) -> tuple[Curve, Curve, Curve]:
    """Mean, least and largest value over R curves, at every step that any of them has; over those that have it."""
    own = [one_per_step(curve) for curve in curves]
    steps = _all_steps(own)
    table_RN = np.stack([_on_steps(curve, steps) for curve in own])
    is_known = np.isfinite(table_RN).any(axis=0)
    steps, table_RN = steps[is_known], np.where(np.isfinite(table_RN), table_RN, np.nan)[:, is_known]
    return (
        (steps, np.nanmean(table_RN, axis=0)),
        (steps, np.nanmin(table_RN, axis=0)),
        (steps, np.nanmax(table_RN, axis=0)),
    )


def json_numbers(values: np.ndarray) -> list[float | None]:
    """Six digits; null for what JSON has no number for."""
    given = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(given)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        digits = np.clip(5 - np.floor(np.log10(np.abs(given))), -300, 300)
        # Dividing by a power of ten gives the number of the fewest digits, multiplying by its inverse does not.
        powers = 10.0 ** np.abs(digits)
        rounded = np.where(digits >= 0, np.round(given * powers) / powers, np.round(given / powers) * powers)
    found = np.where((given == 0) | ~np.isfinite(rounded), given, rounded).astype(object)
    found[~is_finite] = None
    return found.tolist()
