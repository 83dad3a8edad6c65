"""The picture of `trainer compare`: held-out means against CPU seconds of training and against samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unirl.app.comparison import seeds_in_words

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#7f6000")
"""Okabe and Ito's colours that are told apart with any colour vision, brown in place of their light yellow."""
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
CPU_S, SAMPLES, VALUE = range(3)
"""Places in a point of a curve."""
LEGEND_ROW_INCHES = 0.24

Curve = Sequence[Sequence[float]]


def band(curves: Sequence[Curve], axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, smallest and largest value over seeds along one axis of the points, as (x, mean, low, high).

    Between its points a curve is a straight line; x is where any seed has a point, up to the end of the shortest curve.
    """
    end = min(curve[-1][axis] for curve in curves)
    x = np.unique([point[axis] for curve in curves for point in curve if point[axis] <= end])
    values = np.stack([np.interp(x, [p[axis] for p in curve], [p[VALUE] for p in curve]) for curve in curves])
    return x, values.mean(0), values.min(0), values.max(0)


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a comparison's document as PNG. Recipes keep the table's order in the legend."""
    settings = document["settings"]
    recipes = [recipe for recipe in document["recipes"] if recipe["final"] is not None]
    height = max(4.5, 1.2 + LEGEND_ROW_INCHES * (len(recipes) + 2))
    figure = Figure(figsize=(13.0, height), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    base = float(np.mean([recipe["base"] for recipe in recipes]))
    for axes, axis, title in ((left, CPU_S, "CPU seconds of training"), (right, SAMPLES, "samples trained on")):
        for index, recipe in enumerate(recipes):
            _draw_recipe(axes, recipe, axis, index)
        axes.axhline(base, color="black", linestyle=(0, (6, 3)), linewidth=1.0, label=f"{base:.3f}  base")
        axes.set_xlabel(title)
        axes.set_xlim(left=0)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel(f"held-out {settings['metric']}")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9, handlelength=3.6)
    seeds = seeds_in_words(settings["seeds"])
    several = "; line: mean, band: smallest to largest" if len(settings["seeds"]) > 1 else ""
    figure.suptitle(f"{settings['num_evaluated']} held-out samples, {seeds}{several}", fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _draw_recipe(axes: Axes, recipe: Mapping[str, Any], axis: int, index: int) -> None:
    x, mean, low, high = band([run["curve"] for run in recipe["runs"] if run["status"] == "complete"], axis)
    colour = COLOURS[index % len(COLOURS)]
    axes.plot(
        x,
        mean,
        color=colour,
        linestyle=LINES[index // len(COLOURS) % len(LINES)],
        marker=MARKERS[index % len(MARKERS)],
        markersize=4,
        markevery=max(1, len(x) // 8),
        linewidth=1.6,
        label=f"{recipe['final']:.3f}  {recipe['recipe'].rsplit('/', 1)[-1]}",
    )
    axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
