"""The image of `trainer compare`: held-out means against CPU seconds of training and against samples."""

from __future__ import annotations

import math
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
AXES = ((CPU_S, "CPU seconds of training"), (SAMPLES, "samples trained on"))
MAX_OVERLAID = 8
MAX_PANEL_COLUMNS = 7

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
    """Write the image of a comparison's document as PNG: recipes in the table's order.

    Up to `MAX_OVERLAID` recipes share one pair of axes; more have a panel each, with the others in grey behind.
    """
    recipes = [recipe for recipe in document["recipes"] if recipe["final"] is not None]
    figure = _overlaid(recipes) if len(recipes) <= MAX_OVERLAID else _panels(recipes)
    settings = document["settings"]
    seeds = seeds_in_words(settings["seeds"])
    several = "; line: mean, band: smallest to largest" if len(settings["seeds"]) > 1 else ""
    title = f"held-out {settings['metric']} of {settings['num_evaluated']} samples, {seeds}{several}"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _overlaid(recipes: Sequence[Mapping[str, Any]]) -> Figure:
    height = max(4.5, 1.2 + LEGEND_ROW_INCHES * (len(recipes) + 2))
    figure = Figure(figsize=(13.0, height), layout="constrained")
    axes_2 = figure.subplots(1, 2, sharey=True)
    for axes, (axis, title) in zip(axes_2, AXES, strict=True):
        for index, recipe in enumerate(recipes):
            _draw_recipe(axes, recipe, axis, index)
        _draw_base(axes, recipes)
        axes.set_xlabel(title)
    handles, labels = axes_2[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9, handlelength=3.6)
    return figure


def _panels(recipes: Sequence[Mapping[str, Any]]) -> Figure:
    num_rows = math.ceil(len(recipes) / MAX_PANEL_COLUMNS)
    num_columns = math.ceil(len(recipes) / num_rows)
    figure = Figure(figsize=(13.0, 2 * (1.75 * num_rows + 0.4)), layout="constrained")
    halves = figure.add_gridspec(len(AXES), 1)
    for half, (axis, title) in enumerate(AXES):
        part = figure.add_subfigure(halves[half])
        grid = part.subplots(num_rows, num_columns, sharex=True, sharey=True).flatten()
        for index, (axes, recipe) in enumerate(zip(grid, recipes, strict=False)):
            for other in recipes:
                x, mean, _, _ = _band(other, axis)
                axes.plot(x, mean, color="#cfcfcf", linewidth=0.7)
            x, mean, low, high = _band(recipe, axis)
            axes.plot(x, mean, color=COLOURS[0], linewidth=1.8)
            axes.fill_between(x, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
            _draw_base(axes, recipes)
            axes.set_title(_label(recipe), fontsize=7, loc="left", pad=2)
            axes.tick_params(labelsize=7, labelbottom=index + num_columns >= len(recipes))
        for axes in grid[len(recipes) :]:
            axes.set_visible(False)
        part.supxlabel(title, fontsize=9)
    return figure


def _draw_base(axes: Axes, recipes: Sequence[Mapping[str, Any]]) -> None:
    base = float(np.mean([recipe["base"] for recipe in recipes]))
    axes.axhline(base, color="black", linestyle=(0, (6, 3)), linewidth=0.9, label=f"{base:.3f}  base")
    axes.set_xlim(left=0)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _band(recipe: Mapping[str, Any], axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return band([run["curve"] for run in recipe["runs"] if run["status"] == "complete"], axis)


def _label(recipe: Mapping[str, Any]) -> str:
    return f"{recipe['final']:.3f}  {recipe['recipe'].rsplit('/', 1)[-1]}"


def _draw_recipe(axes: Axes, recipe: Mapping[str, Any], axis: int, index: int) -> None:
    x, mean, low, high = _band(recipe, axis)
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
        label=_label(recipe),
    )
    axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
