"""How often a language model answers exactly."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from unirl.data.datasets import read_rows
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.trainer.request import build_text_request
from unirl.types.sampling import ARSamplingParams


def exact_answers(
    pipeline: AutoregressivePipeline, prompts: Path, *, max_new_tokens: int, batch_size: int
) -> dict[str, float]:
    """Share of exact answers to a prompt file: "greedy", "sampled" at temperature 1, and each by category."""
    rows = read_rows(prompts)
    found: dict[str, float] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        params = ARSamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
        answers: list[str] = []
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            conditions = pipeline.encode(build_text_request(part, params, rollout_id=0).primitives, params)
            with pipeline.evaluating():
                segment = pipeline.generate(conditions, params, noise_keys=[row.prompt_id for row in part])
            answers += pipeline.decode(segment).texts
        is_right = [answer == row.metadata["answer"] for answer, row in zip(answers, rows, strict=True)]
        found[name] = fmean(is_right)
        for category in sorted({row.metadata["category"] for row in rows}):
            chosen = [right for right, row in zip(is_right, rows, strict=True) if row.metadata["category"] == category]
            found[f"{name}/{category}"] = fmean(chosen)
    return found


def print_shares(judge: Callable[[Path, Path], dict[str, float]], heldout: Path, description: str | None) -> None:
    """Read a command line of a checkpoint and a prompt file and print what `judge` finds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=heldout)
    arguments = parser.parse_args()
    for name, share in judge(arguments.checkpoint, arguments.prompts).items():
        print(f"{name:28s}{share:.3f}")  # noqa: T201 - the result is the output
