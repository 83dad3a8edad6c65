"""Writes rehearsals.md from what a rehearsal of all recipes says:

    uv run trainer rehearse --all --jobs 2 --fits 80GB > rehearsed.txt
    uv run --no-sync python docs/results/rehearsals.py rehearsed.txt

Several files may be given; of a recipe that several have, the last one counts.
"""

# ruff: noqa: INP001, T201 - a script, no package
from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Rehearsals

Every packaged recipe outside the small worlds, as `uv run trainer rehearse --all --fits 80GB` counts it: GB per device
at the peak of each phase, for rank 0 of the recipe's world. All of them fit 80 GB. "Engine apart" is a device of an
engine that does not train; engines next to training are in the rollout. CPU seconds are of one core next to other work.
Written by `docs/results/rehearsals.py`.

| recipe | ranks | start | rollout | eval | train | engine apart | CPU s |
|---|---|---|---|---|---|---|---|
"""
FOOT = "\n[Large models](../guides/large_models.md) says what is counted and what is not.\n"
PHASES = ("start", "rollout", "eval", "train", "engine")
FIRST = re.compile(r"^(?P<recipe>\S+/\S+): rank 0 of (?P<ranks>\d+), .* in (?P<seconds>\d+) CPU s$")
PEAK = re.compile(r"^  (?P<phase>\w+) +(?P<size>[\d.]+) (?P<unit>[MG])B per device")


def rows(report: str) -> Iterator[tuple[str, str]]:
    """Recipe and its row. Raises SystemExit where one was not rehearsed or does not fit."""
    for part in re.split(r"(?m)^(?=\S)", report):
        head, *lines = part.splitlines() or [""]
        first = FIRST.match(head)
        if first is None and head:
            raise SystemExit(f"not a rehearsal: {head}")
        if first is None:
            continue
        if not any(line.startswith("  fits ") for line in lines):
            raise SystemExit(f"{first['recipe']} does not fit")
        found = {match["phase"]: match for match in map(PEAK.match, lines) if match is not None}
        cells = [f"{_gigabytes(found[phase]):.1f}" if phase in found else "" for phase in PHASES]
        yield (
            first["recipe"],
            f"| `{first['recipe']}` | {first['ranks']} | {' | '.join(cells)} | {first['seconds']} |\n",
        )


def _gigabytes(peak: re.Match[str]) -> float:
    return float(peak["size"]) / (1000 if peak["unit"] == "M" else 1)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    table = {recipe: row for file in sys.argv[1:] for recipe, row in rows(Path(file).read_text(encoding="utf-8"))}
    PAGE.write_text(HEAD + "".join(table[recipe] for recipe in sorted(table)) + FOOT, encoding="utf-8")
    print(f"{len(table)} recipes")
