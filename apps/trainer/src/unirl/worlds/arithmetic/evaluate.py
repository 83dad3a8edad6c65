"""Judge a checkpoint of the arithmetic world: `python -m unirl.worlds.arithmetic.evaluate --checkpoint DIR`."""

from __future__ import annotations

from pathlib import Path

from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.qwen3.pipeline import Qwen3Pipeline
from unirl.pretraining.judging import exact_answers, print_shares

HELDOUT = Path(__file__).parent / "data" / "heldout.jsonl"
MAX_NEW_TOKENS = 8
BATCH_SIZE = 250


def evaluate(checkpoint: Path, prompts: Path = HELDOUT) -> dict[str, float]:
    pipeline = Qwen3Pipeline(Qwen3Bundle(str(checkpoint)))
    return exact_answers(pipeline, prompts, max_new_tokens=MAX_NEW_TOKENS, batch_size=BATCH_SIZE)


if __name__ == "__main__":
    print_shares(evaluate, HELDOUT, __doc__)
