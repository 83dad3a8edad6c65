"""Compares the training step of two checkouts, phase by phase. Prints Markdown.

    uv run python apps/trainer/bench/steps.py OTHER [RECIPE ...] [--turns N] [--steps N] [--set KEY=VALUE ...]

OTHER is another checkout with its own environment (`uv sync` there). Each turn runs one process per checkout, on one
thread: two steps to warm up, then `--steps` steps. CPU seconds of the processes are counted. The ratio is this checkout
over OTHER, turn by turn; the table has the medians.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PHASES = ("rollout", "train")
RECIPES = ("worlds/shapes/flowgrpo", "worlds/arithmetic/grpo", "worlds/shapes/nft")
WARMUP = 2
HERE = Path(__file__).resolve().parents[3]

# Runs inside either checkout, so it uses what both have, or what either has.
STEPS = """
import json, sys, tempfile, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve
from unirl.trainer.clock import PhaseClock
try:
    from unirl.config.runs import run_of
    from unirl.trainer.build.assembly import make_trainer
    from unirl.trainer.build.launch import make_runtime
except ImportError:  # a checkout from before they were apart, whose functions take recipes
    from unirl.trainer.wiring import make_runtime, make_trainer
    run_of = dict
name, warmup, steps, *overrides = sys.argv[1:]
register_resolvers()
recipe = resolve(compose(name, list(overrides)))
clock = PhaseClock()
with tempfile.TemporaryDirectory() as folder, make_runtime(run_of(recipe), Path(folder)) as runtime:
    trainer = make_trainer(run_of({**recipe, "eval": None}), runtime, Path(folder), [], threading.Event(), clock)
    runtime.role("stack").prepare()
    trainer.prepare()
    records = []
    for step in range(int(warmup) + int(steps)):
        before = dict(clock.state_dict()["cpu_s"])
        trainer.step(step)
        after = clock.state_dict()["cpu_s"]
        records.append({phase: after[phase] - before.get(phase, 0.0) for phase in ("rollout", "train")})
print(json.dumps(records[int(warmup):]))
"""


def cpu_seconds(checkout: Path, recipe: str, num_steps: int, overrides: list[str]) -> dict[str, float]:
    """Median CPU seconds of a step by phase, in a process of `checkout`."""
    command = [checkout / ".venv/bin/python", "-c", STEPS, recipe, str(WARMUP), str(num_steps), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=checkout, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{recipe} in {checkout} failed:\n{done.stderr[-2000:]}")
    records = json.loads(done.stdout.splitlines()[-1])
    return {phase: statistics.median(record[phase] for record in records) for phase in PHASES}


def main() -> None:
    """Run the turns of every recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], dest="overrides")
    options = parser.parse_args()
    sys.stdout.write("| recipe | phase | this, CPU s | other, CPU s | this / other |\n|---|---|---|---|---|\n")
    for recipe in options.recipes:
        turns = [
            [cpu_seconds(checkout, recipe, options.steps, options.overrides) for checkout in (HERE, options.other)]
            for _ in range(options.turns)
        ]
        for phase in PHASES:
            mine, theirs = (statistics.median(turn[i][phase] for turn in turns) for i in (0, 1))
            ratio = statistics.median(turn[0][phase] / turn[1][phase] for turn in turns)
            sys.stdout.write(f"| {recipe} | {phase} | {mine:.2f} | {theirs:.2f} | {ratio:.2f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
