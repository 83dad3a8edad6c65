"""Judge a checkpoint by the held-out questions: `python -m unirl.worlds.shapes.questions.evaluate --checkpoint DIR`."""

from __future__ import annotations

from pathlib import Path

from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.pretraining.judging import exact_answers, print_shares

HELDOUT = Path(__file__).parent / "data" / "heldout.jsonl"
MAX_NEW_TOKENS = 10
BATCH_SIZE = 200


def evaluate(checkpoint: Path, prompts: Path = HELDOUT) -> dict[str, float]:
    pipeline = QwenVLPipeline(QwenVLBundle(str(checkpoint)))
    return exact_answers(pipeline, prompts, max_new_tokens=MAX_NEW_TOKENS, batch_size=BATCH_SIZE)


if __name__ == "__main__":
    print_shares(evaluate, HELDOUT, __doc__)
