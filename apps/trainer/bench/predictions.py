"""`trainer plan` beside `trainer bench` on this machine: predicted and measured CPU seconds of a step.

    uv run python apps/trainer/bench/predictions.py [RECIPE ...] [--output FILE]

Without recipes all embedded ones that one process trains without an engine apart. Both run in processes with one
thread, one after the other. Training on texts is planned at the mean length of the measured ones, since a plan takes
every text to be as long as it may be; a rollout lasts as long as its longest text.
"""

# ruff: noqa: INP001, T201 - a script, no package
from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from unirl.app.command_line import parse
from unirl.app.recipe import composed, settled
from unirl.config.catalog import available
from unirl.config.check import check_recipe

WORLDS = "worlds/"
PHASES = ("rollout", "reward", "train")

Report = dict[str, Any]  # Any: JSON


def main() -> None:
    """Write a row for each recipe, then how many are within 15 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--output")
    given = parser.parse_args()
    rows: list[Report] = []
    print("| recipe | rollout s, predicted | measured | train s, predicted | measured | step, predicted / measured |")
    print("|---|---|---|---|---|---|")
    for recipe in given.recipes or [name for name in available() if name.startswith(WORLDS) and is_measured(name)]:
        row = compared(recipe)
        rows.append(row)
        if "error" in row:
            print(f"| `{recipe}` | {row['error']} |", flush=True)
            continue
        rollout, train = row["rollout"], row["train"]
        print(
            f"| `{recipe}` | {rollout[0]:.2f} | {rollout[1]:.2f} | {train[0]:.2f} | {train[1]:.2f} "
            f"| {row['ratio']:.2f} |",
            flush=True,
        )
        if given.output:
            Path(given.output).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    near = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
    print(f"\n{near} of {len(ratios)} steps are within 15 % of the prediction.")


def is_measured(name: str) -> bool:
    """True if one process does all of a recipe."""
    run = check_recipe(settled(composed(parse(["show", name]))))
    apart = any(stage.engine.ability("has_own_weights") for stage in run.stages)
    return not apart and len(run.policies) == 1 and run.resolved["runtime"] == "local"


def compared(recipe: str) -> Report:
    """Seconds of each phase, predicted and measured."""
    measured = report("bench", recipe, "--warmup", "1", "--repeats", "2")
    if "error" in measured:
        return {"recipe": recipe, "error": measured["error"]}
    variants = measured["variants"]
    if tokens := variants.get("replay_tokens"):
        mean, longest = math.ceil(tokens / variants["replay_samples"]), int(variants["replay_longest_tokens"])
        plan = report("plan", recipe, f"sampling.max_new_tokens={longest}")
        short = report("plan", recipe, f"sampling.max_new_tokens={mean}")
        if "error" not in plan and "error" not in short:
            plan["phases"]["train"] = short["phases"]["train"]
    else:
        plan = report("plan", recipe)
    if "error" in plan:
        return {"recipe": recipe, "error": plan["error"]}
    found: Report = {"recipe": recipe}
    for phase in PHASES:
        found[phase] = (
            plan["phases"].get(phase, {"wall_s": 0.0})["wall_s"],
            measured["phases"].get(phase, {"device_s": 0.0})["device_s"],
        )
    found["ratio"] = sum(found[phase][0] for phase in PHASES) / sum(found[phase][1] for phase in PHASES)
    return found


def report(verb: str, recipe: str, *more: str) -> Report:
    """What a verb writes, or what it says about why not."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "unirl.app.main", verb, recipe, *more, "--output", str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"error": next(iter(reversed(done.stderr.strip().splitlines())), f"ended with {done.returncode}")}
        return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
