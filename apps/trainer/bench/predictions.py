"""`trainer plan` beside `trainer bench` on this machine: predicted and measured CPU seconds of a step.

    uv run python apps/trainer/bench/predictions.py [RECIPE ...] [--output FILE]

Without recipes all embedded ones; those that `bench` cannot measure are named with the reason. Both run in processes
with one thread, one after the other. Training on texts is planned at the mean length of the measured ones, since a plan
takes every text to be as long as it may be; a rollout lasts as long as its longest text. Where rewards say how many
samples are trained on, those of the measured steps are planned. A teacher is the model that the run starts from, which
computes as much as a trained one.
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
from unirl.app.environment import packaged_path
from unirl.app.recipe import composed, settled
from unirl.config.catalog import available
from unirl.config.check import check_recipe
from unirl.config.runs import ComposedRun

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
    for recipe in given.recipes or [name for name in available() if name.startswith(WORLDS)]:
        row = compared(recipe)
        rows.append(row)
        if "error" in row:
            print(f"| `{recipe}` | {row['error']} |", flush=True)
        else:
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


def not_measured(run: ComposedRun) -> str | None:
    """Why one process does not do all of a recipe; None if it does."""
    if run.resolved["runtime"] != "local":
        return "left out: several processes"
    if any(stage.engine.ability("has_own_weights") for stage in run.stages):
        return "left out: its engine is apart"
    if run.is_staged:
        return "left out: several stages"
    return "left out: several policies train" if len(run.policies) > 1 else None


def compared(recipe: str) -> Report:
    """Seconds of each phase, predicted and measured, or why not."""
    run = check_recipe(settled(composed(parse(["show", recipe]))))
    if (reason := not_measured(run)) is not None:
        return {"recipe": recipe, "error": reason}
    measured = report("bench", recipe, "--warmup", "1", "--repeats", "2")
    if "error" in measured:
        return {"recipe": recipe, "error": measured["error"]}
    variants, kept = measured["variants"], of_kept(run, measured["geometry"])
    if tokens := variants.get("replay_tokens"):
        mean, longest = math.ceil(tokens / variants["replay_samples"]), int(variants["replay_longest_tokens"])
        plan = report("plan", recipe, *of_length(run, longest), *kept)
        short = report("plan", recipe, *of_length(run, mean), *kept)
        if "error" not in plan and "error" not in short:
            plan["phases"]["train"] = short["phases"]["train"]
    else:
        plan = report("plan", recipe, *kept)
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


def of_kept(run: ComposedRun, geometry: Report) -> list[str]:
    """What makes a plan train on as many samples as were measured, where their number depends on rewards."""
    if run.advantages.node.get("kind") != "accepted":
        return []
    best = round(run.samples_per_prompt * geometry["trained_samples"] / geometry["samples"])
    return ["advantages.kind=best_of_n", f"advantages.num_best={max(best, 1)}", "~advantages.threshold"]


def of_length(run: ComposedRun, num_tokens: int) -> list[str]:
    """What makes texts so long, with the buffer of an overlong reward no longer than they are."""
    buffer = run.resolved["reward"].get("overlong_buffer_len")
    shorter = [f"reward.overlong_buffer_len={min(buffer, num_tokens)}"] if buffer else []
    return [f"sampling.max_new_tokens={num_tokens}", *shorter]


def report(verb: str, recipe: str, *more: str) -> Report:
    """What a verb writes, or what it says about why not."""
    world = recipe.removeprefix(WORLDS).split("/", maxsplit=1)[0]
    teacher = {"TEACHER_MODEL": packaged_path(world, "checkpoint")} if recipe.endswith("/distill") else {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "unirl.app.main", verb, recipe, *more, "--output", str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **teacher},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"error": next(iter(reversed(done.stderr.strip().splitlines())), f"ended with {done.returncode}")}
        return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
