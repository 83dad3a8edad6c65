"""The prompt files of CartPole: each row is a start, by its seed.

`python -m unirl.worlds.cartpole.prompts --out DIR` writes them.
"""

from __future__ import annotations

from pathlib import Path

from unirl.pretraining.prompt_files import write_from_command_line, write_starts


def write_prompts(folder: Path) -> None:
    """`train.jsonl` and `heldout.jsonl`, the same at every call."""
    write_starts(folder, "cartpole", "balance the pole", {"train": range(256), "heldout": range(10_000, 10_064)})


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
