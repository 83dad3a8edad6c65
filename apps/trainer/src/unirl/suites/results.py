"""From scored samples to a document: values by category with intervals, and the differences of two models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.suites.intervals import (
    Estimate,
    Values,
    bootstrapped,
    combined,
    fraction,
    fraction_difference,
    mean_difference,
)
from unirl.suites.suite import Judged, Metric, Suite
from unirl.types.errors import ConfigError, as_sentence

VERSION = 1
RESULTS = "results.json"
ByPrompt = Mapping[str, Sequence[float]]
Document = dict[str, Any]  # Any: JSON values


def document(suite: Suite, model: Mapping[str, Any], judged: Sequence[Judged], changes: Sequence[str]) -> Document:
    """The results of a model. changes: what differs from the suite as it is in the catalogue, in words."""
    failed = [each for each in judged if not each.scores]
    values = {metric.name: _values(suite, metric, judged) for metric in suite.metrics}
    metrics = {metric.name: metric for metric in suite.metrics if values[metric.name]["all"]}
    return {
        "version": VERSION,
        "suite": {"name": suite.name, "version": suite.version, "source": suite.source}
        | {"overall": suite.overall, "weights": dict(suite.weights)},
        "model": dict(model),
        "changes": [*changes, *_unlike_published(suite, judged), *([suite.limits] if suite.limits else [])],
        "num_prompts": len({each.prompt_id for each in judged}),
        "num_samples": len(judged),
        "num_failed": len(failed),
        "first_error": failed[0].error if failed else None,
        "metrics": {name: _of_metric(suite, metric, values[name]) for name, metric in metrics.items()},
        "values": {name: values[name] for name in metrics},
    }


def _unlike_published(suite: Suite, judged: Sequence[Judged]) -> list[str]:
    num = len({each.prompt_id for each in judged})
    if suite.published_prompts in (None, num):
        return []
    return [f"{num} prompts; the published benchmark has {suite.published_prompts}, so numbers cannot be compared"]


def _of_metric(suite: Suite, metric: Metric, values: Mapping[str, Any]) -> Document:
    """values: of `_values`, at least one."""
    parts = {name: estimate(metric, list(own.values())) for name, own in values["categories"].items()}
    if suite.overall == "categories":
        overall = combined(parts, suite.weights)
    else:
        overall = estimate(metric, list(values["all"].values()))
    return {
        "is_fraction": metric.is_fraction,
        "overall": dataclasses.asdict(overall),
        "categories": {name: dataclasses.asdict(part) for name, part in parts.items()},
    }


def estimate(metric: Metric, values: Values) -> Estimate:
    """The mean of a metric with the interval that fits it."""
    return fraction(values) if metric.is_fraction else bootstrapped(values)


def _values(suite: Suite, metric: Metric, judged: Sequence[Judged]) -> dict[str, Any]:  # Any: ByPrompt, by category
    """Values of each prompt that has any, in the order of the samples: of all, and by category."""
    everything: dict[str, list[float]] = {}
    categories: dict[str, dict[str, list[float]]] = {}
    for each in judged:
        if metric.name not in each.scores:
            continue
        if not suite.counts(metric, each.metadata):
            continue
        value = each.scores[metric.name]
        everything.setdefault(each.prompt_id, []).append(value)
        if suite.parts is not None and metric == suite.metrics[0]:
            parts = suite.parts(each)
        else:
            parts = dict.fromkeys(each.categories, [value])
        for category, values in parts.items():
            categories.setdefault(category, {}).setdefault(each.prompt_id, []).extend(values)
    return {"all": everything, "categories": categories}


def compared(before: Document, after: Document) -> Document:
    """Differences of two documents of one suite, `after` less `before`, over the prompts that both have scored.

    Raises ConfigError for documents of two suites, or without a prompt in common.
    """
    names = [each["suite"]["name"] for each in (before, after)]
    if names[0] != names[1] or before["suite"]["version"] != after["suite"]["version"]:
        raise ConfigError(
            f"results of suite {names[0]} (version {before['suite']['version']}) cannot be compared with those of "
            f"{names[1]} (version {after['suite']['version']}). Give results of one suite."
        )
    metrics = {name: _differences(name, before, after) for name in after["metrics"] if name in before["metrics"]}
    return {"version": VERSION, "suite": after["suite"], "before": before["model"], "after": after["model"]} | {
        "changes": {"before": before["changes"], "after": after["changes"]},
        "metrics": metrics,
    }


def _differences(name: str, before: Document, after: Document) -> Document:
    first, second = before["values"][name], after["values"][name]
    gain = fraction_difference if after["metrics"][name]["is_fraction"] else mean_difference

    def paired(firsts: ByPrompt, seconds: ByPrompt) -> Estimate | None:
        shared = [prompt for prompt in seconds if prompt in firsts]
        return gain([firsts[each] for each in shared], [seconds[each] for each in shared]) if shared else None

    everything = paired(first["all"], second["all"])
    if everything is None:
        raise ConfigError(f"the two results have no prompt with {name} in common. Run both on the same prompts.")
    both = {
        category: paired(first["categories"].get(category, {}), own) for category, own in second["categories"].items()
    }
    parts = {category: found for category, found in both.items() if found is not None}
    is_of_categories = after["suite"]["overall"] == "categories"
    overall = combined(parts, after["suite"]["weights"]) if is_of_categories else everything
    return {
        "overall": dataclasses.asdict(overall),
        "categories": {category: dataclasses.asdict(part) for category, part in parts.items()},
    }


def read_results(path: Path) -> Document:
    """The document of a results.json, or of the folder that holds one. Raises ConfigError."""
    file = path / RESULTS if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise ConfigError(f"{file} has version {found['version']}, this reads {VERSION}. Make it again.")
        found["suite"]["name"], found["metrics"], found["values"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--against {path}: no results of a suite ({type(error).__name__}: {as_sentence(error)}) Give the "
            f"{RESULTS} of a model, or its folder."
        ) from error
    return found
