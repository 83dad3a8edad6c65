"""Recipes of a comparison prompt by prompt: who wins how often, whether by chance, and what it looks like."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.stats import binomtest, ttest_rel

MOST_SHOWN = 6
"""Prompts of the sheet: those on which the recipes differ most, as many won as lost."""
MAX_RECIPES = 6
"""Recipes side by side on the sheet."""
MAX_CELL = 160
"""Characters of a text in the table of prompts."""
Line = dict[str, Any]  # Any: JSON values, see docs/reference/run_directory.md


@dataclass(frozen=True)
class Duel:
    """One recipe against another on the held-out samples that both runs kept, after training."""

    recipe: str
    against: str
    prompts: int
    wins: int
    """Prompts whose mean score over the seeds is higher."""
    ties: int
    losses: int
    p_prompts: float | None
    """Two-sided sign test over prompts, ties apart; None where all tie."""
    p_seeds: float | None
    """Two-sided paired t-test over the seeds' held-out means; None for fewer than two seeds, or equal differences."""


def kept_samples(folder: Path, metric: str) -> dict[str, Line]:
    """The samples of a run's last evaluation that have the compared score, by `sample_id`."""
    files = sorted((folder / "samples").glob("eval-*.jsonl"))
    lines = map(json.loads, files[-1].read_text(encoding="utf-8").splitlines()) if files else ()
    return {line["sample_id"]: line for line in lines if isinstance(line["scores"].get(metric), (int, float))}


def duel(
    recipe: str,
    against: str,
    scores: Mapping[str, Mapping[int, Mapping[str, float]]],
    finals: Mapping[str, Mapping[int, float]],
) -> Duel:
    """Compare two recipes. scores: recipe -> seed -> sample -> score; finals: recipe -> seed -> held-out mean. Only
    seeds and samples that both have count."""
    differences: dict[str, list[float]] = defaultdict(list)
    for seed in scores[recipe].keys() & scores[against].keys():
        ours, theirs = scores[recipe][seed], scores[against][seed]
        for sample in ours.keys() & theirs.keys():
            differences[sample].append(ours[sample] - theirs[sample])
    means = [statistics.fmean(values) for values in differences.values()]
    wins, losses = sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
    p_prompts = float(binomtest(wins, wins + losses).pvalue) if wins + losses else None
    ties = len(means) - wins - losses
    return Duel(recipe, against, len(means), wins, ties, losses, p_prompts, _of_seeds(recipe, against, finals))


def _of_seeds(recipe: str, against: str, finals: Mapping[str, Mapping[int, float]]) -> float | None:
    seeds = sorted(finals[recipe].keys() & finals[against].keys())
    ours, theirs = ([finals[name][seed] for seed in seeds] for name in (recipe, against))
    if len(seeds) < 2 or len({a - b for a, b in zip(ours, theirs, strict=True)}) == 1:
        return None
    return float(ttest_rel(ours, theirs).pvalue)


def duels_of(document: Mapping[str, Any], output: Path) -> list[Line]:
    """The best recipe of a comparison against every other one; writes the sheet of samples, where there are images.

    document: comparison.json without its duels. Empty where no run kept samples.
    """
    metric = document["settings"]["metric"]
    recipes = [recipe for recipe in document["recipes"] if recipe["num_complete"]]
    kept = {
        recipe["recipe"]: {
            run["seed"]: kept_samples(output / run["run_dir"], metric)
            for run in recipe["runs"]
            if run["status"] == "complete"
        }
        for recipe in recipes
    }
    scores = {
        name: {seed: {key: line["scores"][metric] for key, line in lines.items()} for seed, lines in seeds.items()}
        for name, seeds in kept.items()
    }
    finals = {
        recipe["recipe"]: {run["seed"]: run["final"] for run in recipe["runs"] if run["status"] == "complete"}
        for recipe in recipes
    }
    found = [duel(recipes[0]["recipe"], other["recipe"], scores, finals) for other in recipes[1:]]
    found = [each for each in found if each.prompts]
    if found:
        draw_most_different(kept, [recipe["recipe"] for recipe in recipes][:MAX_RECIPES], metric, output)
    return [asdict(each) for each in found]


def most_different(scores: Sequence[Mapping[str, float]]) -> list[str]:
    """Samples on which the first recipe is furthest above the second, then those on which it is furthest below."""
    shared = sorted(scores[0].keys() & scores[1].keys(), key=lambda key: scores[1][key] - scores[0][key])
    half = MOST_SHOWN // 2
    best = [key for key in shared[:half] if scores[0][key] > scores[1][key]]
    worst = [key for key in shared[-half:] if scores[0][key] < scores[1][key]]
    return [*best, *worst]


def draw_most_different(
    kept: Mapping[str, Mapping[int, Mapping[str, Line]]], names: Sequence[str], metric: str, output: Path
) -> None:
    """Write comparison_samples.png: a row per prompt, a column per recipe, of the first seed that all have."""
    seeds = sorted(set.intersection(*(set(kept[name]) for name in names)))
    if not seeds:
        return
    of_seed = [kept[name][seeds[0]] for name in names]
    samples = [
        key
        for key in most_different([{k: line["scores"][metric] for k, line in lines.items()} for lines in of_seed])
        if all(key in lines and (lines[key]["media"] or {}).get("kind") == "image" for lines in of_seed)
    ]
    if not samples:
        return
    import numpy as np
    import torch
    from PIL import Image

    from unirl.tracking.media import grid

    images, labels = [], []
    for key in samples:
        for name, lines in zip(names, of_seed, strict=True):
            line = lines[key]
            folder = output / name / f"seed{seeds[0]}" / "samples"
            image = Image.open(folder / line["media"]["file"]).convert("RGB")
            images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255)
            labels.append(f"{line['prompt']}: {name.rsplit('/', 1)[-1]} {line['scores'][metric]:.3g}")
    if len({image.shape for image in images}) == 1:
        grid(torch.stack(images), labels, columns=len(names)).save(output / "comparison_samples.png")


def as_markdown(duels: Sequence[Mapping[str, Any]]) -> str:
    """A section of comparison.md."""
    if not duels:
        return ""
    lines = [
        "",
        f"`{duels[0]['recipe']}` against the others, on the held-out samples that the runs kept; p of a sign test over "
        "prompts and of a paired t-test over seeds:",
        "",
        "| against | prompts | wins | ties | losses | p (prompts) | p (seeds) |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in duels:
        chances = ["-" if each[key] is None else f"{each[key]:.2g}" for key in ("p_prompts", "p_seeds")]
        cells = [each["against"], *(str(each[key]) for key in ("prompts", "wins", "ties", "losses")), *chances]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
