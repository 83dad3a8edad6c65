"""The prompt files of the tabletop: each row is a start, by its seed.

`python -m unirl.worlds.tabletop.prompts --out DIR` writes them.
"""

from __future__ import annotations

from pathlib import Path

from unirl.pretraining.prompt_files import write_from_command_line, write_rows

PROMPT = "push the red block onto the green ring"
NUM_TRAIN, NUM_HELDOUT = 2048, 512
FIRST_HELDOUT = 1_000_000
"""Seeds of the held-out starts begin here; demonstrations and training have lower ones."""


def write_prompts(folder: Path) -> None:
    """`train.jsonl` and `heldout.jsonl`, the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, first, number in (("train", 0, NUM_TRAIN), ("heldout", FIRST_HELDOUT, NUM_HELDOUT)):
        rows = [
            {"prompt": PROMPT, "prompt_id": f"tabletop-{name}-{row:04d}", "metadata": {"seed": first + row}}
            for row in range(number)
        ]
        write_rows(folder / f"{name}.jsonl", rows)


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
