"""Prompt files of the worlds: which requests are held out, how rows are written, and the command that writes them."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path


def split_keys(
    groups: Mapping[str, Collection[str]], *, heldout_fraction: float, kept: Mapping[str, float]
) -> tuple[set[str], set[str]]:
    """Keys for training and keys that are held out: of each group a fraction, in the order of the keys' hashes.

    kept: share of a group that each side keeps; all of a group that is not named.
    """
    train: set[str] = set()
    heldout: set[str] = set()
    for name, keys in groups.items():
        ranked = sorted(keys, key=lambda key: hashlib.sha256(key.encode()).digest())
        cut, share = round(len(ranked) * heldout_fraction), kept.get(name, 1.0)
        heldout.update(ranked[: round(cut * share)])
        train.update(ranked[cut : cut + round((len(ranked) - cut) * share)])
    return train, heldout


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_split(
    folder: Path, world: str, split: tuple[Sequence[str], Sequence[str]], category_of: Callable[[str], str]
) -> None:
    """Write `train.jsonl` and `heldout.jsonl`: rows of prompt, prompt_id and metadata.category."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, prompts in zip(("train", "heldout"), split, strict=True):
        rows = [
            {
                "prompt": prompt,
                "prompt_id": f"{world}-{name}-{index:03d}",
                "metadata": {"category": category_of(prompt)},
            }
            for index, prompt in enumerate(prompts)
        ]
        write_rows(folder / f"{name}.jsonl", rows)


def write_starts(folder: Path, world: str, prompt: str, seeds: Mapping[str, Sequence[int]]) -> None:
    """Write `NAME.jsonl` for each of `seeds`: rows of prompt, prompt_id and metadata.seed, the seed of an episode's
    start."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in seeds.items():
        rows = [
            {"prompt": prompt, "prompt_id": f"{world}-{name}-{index:04d}", "metadata": {"seed": seed}}
            for index, seed in enumerate(own)
        ]
        write_rows(folder / f"{name}.jsonl", rows)


def write_from_command_line(write: Callable[[Path], None], description: str | None) -> None:
    """Call `write` with the folder that a command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the prompt files")
    write(parser.parse_args().out)
