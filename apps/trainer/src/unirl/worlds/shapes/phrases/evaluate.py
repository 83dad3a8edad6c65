"""Judge the rewrites of a writer: `python -m unirl.worlds.shapes.phrases.evaluate --checkpoint DIR`.

A rewrite is right where it asks for what the phrase means, in these or other words of the painter.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from unirl.data.datasets import read_rows
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.qwen3.pipeline import Qwen3Pipeline
from unirl.pretraining.judging import print_shares
from unirl.reward.worlds.shapes_grammar import parse_prompt
from unirl.types.media import Texts
from unirl.types.sampling import ARSamplingParams
from unirl.worlds.shapes.phrases.text import INSTRUCTION
from unirl.worlds.shapes.world import scene_key

HELDOUT = Path(__file__).parent / "data" / "heldout.jsonl"
MAX_NEW_TOKENS = 12


def is_right(rewrite: str, meaning: str) -> bool:
    """True if every scene that the rewrite asks for is one that `meaning` asks for."""
    try:
        said = parse_prompt(rewrite)
    except ValueError:
        return False
    asked = parse_prompt(meaning)
    if asked.relation is None:
        return sorted(said.objects) == sorted(asked.objects)
    return scene_key(said) == scene_key(asked)


def evaluate(checkpoint: Path, prompts: Path = HELDOUT) -> dict[str, float]:
    """Share of right rewrites of a prompt file: "greedy" and "sampled" at temperature 1, and each by category."""
    pipeline, rows = Qwen3Pipeline(Qwen3Bundle(str(checkpoint))), read_rows(prompts)
    asked = {"text": Texts(texts=[INSTRUCTION.format(prompt=row.prompt) for row in rows])}
    found: dict[str, float] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        params = ARSamplingParams(temperature=temperature, max_new_tokens=MAX_NEW_TOKENS)
        with pipeline.evaluating():
            conditions = pipeline.encode(asked, params)
            segment = pipeline.generate(conditions, params, noise_keys=[row.prompt_id for row in rows])
        right = [
            is_right(text, row.metadata["meaning"])
            for text, row in zip(pipeline.decode(segment).texts, rows, strict=True)
        ]
        found[name] = fmean(right)
        for category in sorted({row.metadata["category"] for row in rows}):
            own = [each for each, row in zip(right, rows, strict=True) if row.metadata["category"] == category]
            found[f"{name}/{category}"] = fmean(own)
    return found


if __name__ == "__main__":
    print_shares(evaluate, HELDOUT, __doc__)
