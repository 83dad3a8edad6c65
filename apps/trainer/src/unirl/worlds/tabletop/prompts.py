"""The prompt files of the tabletop: each row is a start, by its seed; of a demonstration with the moves of an expert.

`python -m unirl.worlds.tabletop.prompts --out DIR` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unirl.pretraining.prompt_files import write_from_command_line, write_starts
from unirl.worlds.tabletop.environment import MAX_MOVES
from unirl.worlds.tabletop.physics import expert_move, is_home, moved, starts_of

PROMPT = "push the red block onto the green ring"
NUM_TRAIN, NUM_HELDOUT = 2048, 512
HELDOUT = range(1_000_000, 1_000_000 + NUM_HELDOUT)
"""Seeds of the held-out starts; demonstrations and training have lower ones."""
NUM_DEMONSTRATIONS, FIRST_DEMONSTRATION, SHAKE = 2000, 500_000, 0.15
"""How many demonstrations there are, their first seed, and the deviation of the noise of the hand, in moves."""


def write_prompts(folder: Path) -> None:
    """`train.jsonl`, `heldout.jsonl` and `demonstrations.jsonl`, the same at every call."""
    write_starts(folder, "tabletop", PROMPT, {"train": range(NUM_TRAIN), "heldout": HELDOUT})
    seeds = range(FIRST_DEMONSTRATION, FIRST_DEMONSTRATION + NUM_DEMONSTRATIONS)
    rows = (
        {"prompt": PROMPT, "metadata": {"seed": seed, "moves": moves}}
        for seed, moves in zip(seeds, demonstrated(seeds), strict=True)
    )
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (folder / "demonstrations.jsonl").write_text(lines, encoding="utf-8")


def demonstrated(seeds: Sequence[int]) -> list[list[list[float]]]:
    """Moves of the expert with a shaky hand from each start, to two digits, until the block is home or moves are up."""
    rng = np.random.default_rng(0)
    state = starts_of(seeds)
    found: list[list[list[float]]] = [[] for _ in seeds]
    for _ in range(MAX_MOVES):
        live = ~is_home(state)
        shake = SHAKE * rng.standard_normal((len(state), 2))
        moves = np.clip(expert_move(state) + shake, -1, 1).round(2)
        state = np.where(live[:, None, None], moved(state, moves.astype(np.float32)), state)
        for row in np.flatnonzero(live):
            found[row].append(moves[row].tolist())
    return found


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
