"""The results of `trainer compare` as data: means and spreads over seeds, the JSON document and the Markdown table.

Everything here is a function of numbers; docs/guides/compare.md describes the document.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = 1
NORMAL_975 = statistics.NormalDist().inv_cdf(0.975)
STUDENT_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's distribution with 1, 2, ... degrees of freedom."""
COUNT_TOLERANCE = 1e-6
"""How far a mean times its number of samples may be from a whole number, by rounding, where each sample is 0 or 1."""

Document = dict[str, Any]  # Any: JSON values


@dataclass(frozen=True)
class SeedResult:
    """One run."""

    seed: int
    run_dir: str
    """Relative to the output folder."""
    status: Literal["complete", "failed", "unfinished"]
    error: str | None = None
    curve: tuple[tuple[float, int, float], ...] = ()
    """(CPU seconds of training, samples trained on, held-out mean) at every evaluation, the first of the base."""
    num_rollouts: int = 0
    num_evaluated: int = 0
    """Samples in each held-out mean."""
    columns: tuple[tuple[str, float, float], ...] = ()
    """(name, before training, at the end) of each held-out mean shown besides the compared one."""

    @property
    def base(self) -> float:
        """Before training; of a complete run."""
        return self.curve[0][2]

    @property
    def final(self) -> float:
        """At the end; of a complete run."""
        return self.curve[-1][2]


@dataclass(frozen=True)
class RecipeResult:
    """The runs of one recipe."""

    name: str
    algorithm: str
    seeds: tuple[SeedResult, ...]

    @property
    def complete(self) -> list[SeedResult]:
        """The runs that count."""
        return [run for run in self.seeds if run.status == "complete"]


def complete_run(
    seed: int, run_dir: str, summary: Mapping[str, Any], metric: str, columns: Sequence[str] = ()
) -> SeedResult:
    """The result of a finished run from its summary; `columns` are held-out means to show next to `metric`."""
    records = [summary["evaluations"][step] for step in sorted(summary["evaluations"], key=int)]
    return SeedResult(
        seed,
        run_dir,
        "complete",
        curve=tuple((r["train_cpu_s"], r["num_samples_trained"], r["overall"][metric]) for r in records),
        num_rollouts=summary["num_rollouts"],
        num_evaluated=records[-1]["num_samples"],
        columns=tuple((name, records[0]["overall"][name], records[-1]["overall"][name]) for name in columns),
    )


def counts_successes(results: Sequence[RecipeResult]) -> bool:
    """True if the metric is 0 or 1 for each sample: every held-out mean is a whole number of samples over all."""
    runs = [run for result in results for run in result.complete]
    products = [value * run.num_evaluated for run in runs for _, _, value in run.curve]
    are_fractions = all(0 <= value <= 1 for run in runs for _, _, value in run.curve)
    return are_fractions and all(abs(product - round(product)) < COUNT_TOLERANCE for product in products)


def binomial_half_width(base: float, final: float, num_evaluated: int, num_seeds: int) -> float:
    """Half of the 95 % interval of `final - base`, two fractions of successes, by the normal approximation.

    The base is one sample of `num_evaluated`, the final value pools `num_seeds` of them. Both draw the same prompts and
    noise, which makes their difference more certain than this says.
    """
    variance = final * (1 - final) / (num_evaluated * num_seeds) + base * (1 - base) / num_evaluated
    return NORMAL_975 * math.sqrt(variance)


def student_half_width(gains: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean of the seeds' gains; None for a single seed."""
    if len(gains) == 1:
        return None
    freedom = len(gains) - 1
    quantile = STUDENT_975[freedom - 1] if freedom <= len(STUDENT_975) else NORMAL_975
    return quantile * statistics.stdev(gains) / math.sqrt(len(gains))


def as_document(settings: Mapping[str, Any], results: Sequence[RecipeResult]) -> Document:
    """The whole comparison, the best recipe first and those without a finished run last."""
    is_binomial = counts_successes(results)
    recipes = [_recipe(result, is_binomial) for result in results]
    recipes.sort(key=lambda recipe: math.inf if recipe["final"] is None else -recipe["final"])
    evaluated = [run.num_evaluated for result in results for run in result.complete]
    return {
        "schema": SCHEMA,
        "settings": {
            **settings,
            "num_evaluated": max(evaluated, default=None),
            "interval": "binomial" if is_binomial else "student",
        },
        "recipes": recipes,
    }


def _recipe(result: RecipeResult, is_binomial: bool) -> Document:
    runs = result.complete
    document: Document = {"recipe": result.name, "algorithm": result.algorithm, "num_complete": len(runs)}
    keys = ("base", "final", "final_half_range", "gain", "gain_interval", "num_samples", "num_rollouts", "train_cpu_s")
    document |= dict.fromkeys(keys)
    if runs:
        finals = [run.final for run in runs]
        base, final = statistics.fmean(run.base for run in runs), statistics.fmean(finals)
        if is_binomial:
            half = binomial_half_width(base, final, runs[0].num_evaluated, len(runs))
        else:
            half = student_half_width([run.final - run.base for run in runs])
        document |= {
            "base": base,
            "final": final,
            "final_half_range": (max(finals) - min(finals)) / 2,
            "gain": final - base,
            "gain_interval": None if half is None else [final - base - half, final - base + half],
            "num_samples": statistics.fmean(run.curve[-1][1] for run in runs),
            "num_rollouts": statistics.fmean(run.num_rollouts for run in runs),
            "train_cpu_s": statistics.fmean(run.curve[-1][0] for run in runs),
        }
    document["columns"] = {
        name: {"base": statistics.fmean(befores), "final": statistics.fmean(afters)}
        for name, befores, afters in _columns(runs)
    }
    document["runs"] = [_run(run) for run in result.seeds]
    return document


def _columns(runs: Sequence[SeedResult]) -> Iterator[tuple[str, list[float], list[float]]]:
    """Each column's values over seeds, before training and at the end."""
    for of_seeds in zip(*(run.columns for run in runs), strict=True):
        yield of_seeds[0][0], [before for _, before, _ in of_seeds], [after for _, _, after in of_seeds]


def _run(run: SeedResult) -> Document:
    is_complete = run.status == "complete"
    return {
        "seed": run.seed,
        "run_dir": run.run_dir,
        "status": run.status,
        "error": run.error,
        "final": run.final if is_complete else None,
        "gain": run.final - run.base if is_complete else None,
        "num_samples": run.curve[-1][1] if is_complete else None,
        "num_rollouts": run.num_rollouts if is_complete else None,
        "train_cpu_s": run.curve[-1][0] if is_complete else None,
        "columns": {name: {"base": before, "final": after} for name, before, after in run.columns},
        "curve": [list(point) for point in run.curve],
    }


def seeds_in_words(seeds: Sequence[int]) -> str:
    """`seed 0`, or `seeds 0, 1`."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def as_markdown(document: Mapping[str, Any]) -> str:
    """The table, and the runs that are missing from it."""
    settings = document["settings"]
    seeds = seeds_in_words(settings["seeds"])
    changes = f" With {' '.join(settings['overrides'])}." if settings["overrides"] else ""
    lines = [
        f"Held-out `{settings['metric']}` over {settings['num_evaluated'] or '-'} samples after {settings['cpu_s']:g} "
        f"CPU seconds of training from `{settings['base_model']}`, {seeds}.{changes}",
        "",
    ]
    names = settings["columns"]
    head = ["recipe", "algorithm", "base", "final", "gain (95 %)", *names, "samples", "rollouts", "CPU s", "seeds"]
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(_cells(recipe, names))} |" for recipe in document["recipes"]]
    missing = [
        f"- {recipe['recipe']} seed {run['seed']}: {run['error'] or 'not finished'}"
        for recipe in document["recipes"]
        for run in recipe["runs"]
        if run["status"] != "complete"
    ]
    if missing:
        lines += ["", "Not in the table:", "", *missing]
    return "\n".join(lines) + "\n"


def _cells(recipe: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    head, seeds = [recipe["recipe"], recipe["algorithm"]], str(recipe["num_complete"])
    if recipe["final"] is None:
        return [*head, *["-"] * (6 + len(columns)), seeds]
    spread = f" +- {recipe['final_half_range']:.3f}" if recipe["num_complete"] > 1 else ""
    interval = recipe["gain_interval"]
    between = "" if interval is None else f" [{interval[0]:+.3f}, {interval[1]:+.3f}]"
    counts = [f"{recipe[key]:.0f}" for key in ("num_samples", "num_rollouts", "train_cpu_s")]
    return [
        *head,
        f"{recipe['base']:.3f}",
        f"{recipe['final']:.3f}{spread}",
        f"{recipe['gain']:+.3f}{between}",
        *(f"{recipe['columns'][name]['base']:.3f} to {recipe['columns'][name]['final']:.3f}" for name in columns),
        *counts,
        seeds,
    ]
