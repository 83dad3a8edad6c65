"""Preference pairs of the shapes world: `python -m unirl.worlds.shapes.pairs --out DIR [--seed 0] [--num-pairs 512]`.

Of every pair the chosen image is a drawing that shows what the prompt asks for, the rejected one a drawing that is
wrong in one respect. Both are what the base draws, so their difference is what it has to learn. The verifier confirms
every image. Prompts are those of RL training; none is held out.
The folder gets `pairs.jsonl`, `chosen.jsonl` with the chosen images alone as targets of fine-tuning, and `pairs.png`, a
sheet of tiles, see `unirl.types.preference`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from unirl.reward.worlds.shapes import score_shapes
from unirl.reward.worlds.shapes_grammar import PromptSpec, parse_prompt
from unirl.worlds.shapes import world
from unirl.worlds.shapes.sheet import coarse, write_sheet

NUM_PAIRS = 512
COLUMNS = 32
"""Tiles in a row of the sheet."""


def draw_pairs(num_pairs: int, seed: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(prompt, chosen, rejected), images uint8 [3, 32, 32]; prompts take turns in a shuffled order."""
    rng = np.random.default_rng(seed)
    prompts, _ = world.split_prompts()
    pairs: list[tuple[str, np.ndarray, np.ndarray]] = []
    while len(pairs) < num_pairs:
        for index in rng.permutation(len(prompts))[: num_pairs - len(pairs)]:
            prompt = prompts[index]
            chosen = _confirmed(prompt, True, rng, lambda spec, rng: world.sample_layout(spec, rng, 0.0))
            rejected = _confirmed(prompt, False, rng, world.near_miss)
            pairs.append((prompt, chosen, rejected))
    return pairs


def write_pairs(folder: Path, pairs: list[tuple[str, np.ndarray, np.ndarray]]) -> None:
    """Write `pairs.jsonl`, `chosen.jsonl` and the sheet `pairs.png`, chosen and rejected next to each other."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sheet(folder / "pairs.png", [picture for _, *both in pairs for picture in both], COLUMNS)
    lines = [
        json.dumps(
            {
                "prompt": prompt,
                "prompt_id": f"shapes-pair-{index:04d}",
                "metadata": {
                    "category": parse_prompt(prompt).category,
                    "images": [f"pairs.png#{2 * index}", f"pairs.png#{2 * index + 1}"],
                    "scores": [1, 0],
                },
            }
        )
        for index, (prompt, _, _) in enumerate(pairs)
    ]
    (folder / "pairs.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    targets = [
        json.dumps(
            {
                "prompt": prompt,
                "prompt_id": f"shapes-drawing-{index:04d}",
                "metadata": {"category": parse_prompt(prompt).category, "target": f"pairs.png#{2 * index}"},
            }
        )
        for index, (prompt, _, _) in enumerate(pairs)
    ]
    (folder / "chosen.jsonl").write_text("".join(line + "\n" for line in targets), encoding="utf-8")


def _confirmed(
    prompt: str,
    is_right: bool,
    rng: np.random.Generator,
    layout: Callable[[PromptSpec, np.random.Generator], world.Layout],
) -> np.ndarray:
    """A drawing on which the verifier agrees."""
    while True:
        picture = coarse(world.render(layout(parse_prompt(prompt), rng), rng))
        strict, _ = score_shapes(torch.from_numpy(picture)[None], [prompt])
        if bool(strict[0]) == is_right:
            return picture


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write pairs.jsonl and pairs.png.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-pairs", type=int, default=NUM_PAIRS)
    arguments = parser.parse_args()
    write_pairs(arguments.out, draw_pairs(arguments.num_pairs, arguments.seed))
