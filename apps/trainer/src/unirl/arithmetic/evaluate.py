"""Judge a checkpoint of the arithmetic world: `python -m unirl.arithmetic.evaluate --checkpoint DIR`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.qwen3.pipeline import Qwen3Pipeline
from unirl.types.media import Texts
from unirl.types.sampling import ARSamplingParams

HELDOUT = Path(__file__).parent / "data" / "heldout.jsonl"
MAX_NEW_TOKENS = 8
BATCH_SIZE = 250


def evaluate(checkpoint: Path, prompts: Path = HELDOUT) -> dict[str, float]:
    """Share of exact answers to a prompt file: "greedy", "sampled" at temperature 1, and greedy by category."""
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    pipeline = Qwen3Pipeline(Qwen3Bundle(str(checkpoint)))
    found: dict[str, float] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        params = ARSamplingParams(temperature=temperature, max_new_tokens=MAX_NEW_TOKENS)
        answers: list[str] = []
        for start in range(0, len(rows), BATCH_SIZE):
            part = rows[start : start + BATCH_SIZE]
            conditions = pipeline.encode({"text": Texts(texts=[row["prompt"] for row in part])}, params)
            with pipeline.evaluating():
                segment = pipeline.generate(conditions, params, noise_keys=[row["prompt_id"] for row in part])
            answers += pipeline.decode(segment).texts
        is_right = [answer == row["metadata"]["answer"] for answer, row in zip(answers, rows, strict=True)]
        found[name] = fmean(is_right)
        for category in sorted({row["metadata"]["category"] for row in rows}):
            chosen = [
                right for right, row in zip(is_right, rows, strict=True) if row["metadata"]["category"] == category
            ]
            found[f"{name}/{category}"] = fmean(chosen)
    return found


def main() -> None:
    """Read the command line and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=HELDOUT)
    arguments = parser.parse_args()
    for name, share in evaluate(arguments.checkpoint, arguments.prompts).items():
        print(f"{name:28s}{share:.3f}")  # noqa: T201 - the result is the output


if __name__ == "__main__":
    main()
