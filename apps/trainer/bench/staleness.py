"""Held-out accuracy against the age of samples: every sample of a run is exactly S versions old.

    uv run python apps/trainer/bench/staleness.py [--recipe R] [--staleness 0 1 2 4 8] [--seeds 0 1 2] --output FILE

A run repeats an order (`schedule.replay`) in which request r begins at version max(0, r - S), so its result depends on
neither speed nor machine. Runs that FILE has are not run again. Writes a table: mean over the seeds of the held-out
score after training, and the least.
"""

# ruff: noqa: INP001, T201 - a script, no package
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WEIGHTS = ["parts/correction=truncated"]
CORRECTIONS = {
    "none": [*WEIGHTS, "algorithm.rollout_correction.lower=1", "algorithm.rollout_correction.upper=1"],
    "ratio to the sampler": ["algorithm.old_logp_source=rollout"],
    "truncated at 2": WEIGHTS,
    "IcePop, 0.5 to 5": ["parts/correction=icepop"],
    "decoupled": [*WEIGHTS, "algorithm.rollout_correction.lower=0", "algorithm.rollout_correction.upper=null"],
    "M2PO": [
        *WEIGHTS,
        "algorithm.rollout_correction.upper=null",
        "+algorithm.rollout_correction.m2_threshold=0.04",
    ],
}
Row = dict[str, Any]  # Any: JSON


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="worlds/arithmetic/grpo")
    parser.add_argument("--engine", default="text_replica_cpu")
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", required=True)
    given, words = parser.parse_known_args()
    file = Path(given.output)
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    known = {(row["staleness"], row["correction"], row["seed"]) for row in rows}
    for seed in given.seeds:
        for staleness in given.staleness:
            for correction, own in CORRECTIONS.items() if staleness else [("none", [])]:
                if (staleness, correction, seed) not in known:
                    base = [given.recipe, f"parts/engine={given.engine}", f"seed={seed}", *own, *words]
                    rows.append(
                        {"staleness": staleness, "correction": correction, "seed": seed, **result(base, staleness)}
                    )
                    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(table(rows))


def result(words: list[str], staleness: int) -> Row:
    """Held-out scores of a run whose samples are all `staleness` versions old, and the reward of its last rollouts."""
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "requests.jsonl"
        lines = [{"request": r, "rollout": r, "version": max(0, r - staleness)} for r in range(1000)]
        order.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        schedule = ["schedule.kind=async", f"schedule.max_staleness={staleness}", f"schedule.replay={order}"]
        run_dir = Path(folder) / "run"
        subprocess.run(
            [sys.executable, "-m", "unirl.app.main", *words, *schedule, f"run_dir={run_dir}", "guardrails.action=off"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            check=True,
        )
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lags = {line["schedule/lag/oldest"] for line in metrics if line["step"] > staleness}
    if lags != {staleness}:
        raise SystemExit(f"samples were {lags} versions old, not {staleness}")
    rewards = [line["reward/mean"] for line in metrics if "reward/mean" in line]
    return {"held_out": summary["eval_after"]["overall"], "reward": statistics.fmean(rewards[-5:])}


def table(rows: list[Row]) -> str:
    """Corrections by age: mean of the held-out reward over the seeds, the least in brackets."""
    ages = sorted({row["staleness"] for row in rows})
    lines = ["| correction | " + " | ".join(f"S = {age}" for age in ages) + " |", "|---" * (len(ages) + 1) + "|"]
    for correction in CORRECTIONS:
        cells = []
        for age in ages:
            own = [
                row["held_out"]["reward"]
                for row in rows
                if row["staleness"] == age and (row["correction"] == correction or age == 0)
            ]
            cells.append(f"{statistics.fmean(own):.3f} ({min(own):.3f})" if own else "")
        lines.append(f"| {correction} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
