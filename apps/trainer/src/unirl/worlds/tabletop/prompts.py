"""The prompt files of the tabletop: each row is a start, by its seed.

`python -m unirl.worlds.tabletop.prompts --out DIR` writes them.
"""

from __future__ import annotations

from pathlib import Path

from unirl.pretraining.prompt_files import write_from_command_line, write_starts

PROMPT = "push the red block onto the green ring"
NUM_TRAIN, NUM_HELDOUT = 2048, 512
HELDOUT = range(1_000_000, 1_000_000 + NUM_HELDOUT)
"""Seeds of the held-out starts; demonstrations and training have lower ones."""


def write_prompts(folder: Path) -> None:
    """`train.jsonl` and `heldout.jsonl`, the same at every call."""
    write_starts(folder, "tabletop", PROMPT, {"train": range(NUM_TRAIN), "heldout": HELDOUT})


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
