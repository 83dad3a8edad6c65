"""What `trainer list` writes, read from recipes and sources: recipes, worlds, algorithms, scorers. Imports no torch."""

from __future__ import annotations

import ast
import importlib.resources
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable

from unirl.app.evidence import LEVELS, known
from unirl.config.catalog import available
from unirl.config.signatures import read_module, read_target

WORLDS = "worlds/"
"""Folder of the recipes that every machine can train."""
_ALGORITHMS = "unirl.algorithms"
_BASE = f"{_ALGORITHMS}.base.StageAlgorithm"
_MOST_NAMES = 2
_USUAL = ("nft", "grpo")
"""Names of the recipes of a world to begin with."""

Row = tuple[str, ...]


def write_list(what: str) -> None:
    """Write one of LISTS to standard output."""
    rows, legend = LISTS[what]()
    _write_table(rows)
    if legend:
        sys.stdout.write(f"\n{legend[0]}:\n")
        _write_table([(f"  {name}", text) for name, text in legend[1].items()])


Table = tuple[list[Row], tuple[str, Mapping[str, str]] | None]
"""Rows with their header, and the title and entries of what is written below them."""


def _recipes() -> Table:
    levels = known("levels")
    ordered = sorted(available().items(), key=lambda item: (not item[0].startswith(WORLDS), item[0]))
    rows = [(name, " ".join(levels[name]), _first_sentence(text)) for name, text in ordered]
    return [("recipe", "known", "what it is"), *rows], ("known", LEVELS)


def _first_sentence(text: str) -> str:
    """The text up to its first full stop; one in the first 20 letters ends an abbreviation, as in Dr. GRPO."""
    found = re.match(r".{20,}?\.(?= [A-Z`])", text)
    return found.group() if found else text


def _rewards() -> Table:
    from unirl.reward.catalog import CATALOG

    rows = [(name, card.inputs, card.scale, card.extra or "-", card.source) for name, card in CATALOG.items()]
    return [("name", "input", "range and scale", "extra", "source"), *sorted(rows)], None


def _worlds() -> Table:
    recipes, models = defaultdict(list), known("models")
    for name in available():
        if name.startswith(WORLDS):
            recipes[name.split("/")[1]].append(name)
    described = dict(_packages(importlib.resources.files("unirl.worlds")))
    rows = [
        (world, ", ".join(sorted({model for name in names for model in models[name]})), _some(names), described[world])
        for world, names in sorted(recipes.items())
    ]
    return [("world", "model", "recipes", "what it is"), *rows], None


def _packages(folder: Traversable) -> Iterator[tuple[str, str]]:
    """Name and summary of every package below a folder."""
    for entry in folder.iterdir():
        if entry.is_dir() and (entry / "__init__.py").is_file():
            yield entry.name, _summary((entry / "__init__.py").read_text(encoding="utf-8"))
            yield from _packages(entry)


def _algorithms() -> Table:
    used = defaultdict(list)
    for recipe, names in known("algorithms").items():
        for name in names:
            used[name].append(recipe)
    rows = []
    for file in importlib.resources.files(_ALGORITHMS).iterdir():
        module = f"{_ALGORITHMS}.{file.name.removesuffix('.py')}"
        parsed = read_module(module) if file.name.endswith(".py") and file.name != "__init__.py" else None
        for name, node in parsed.definitions.items() if parsed is not None else ():
            if isinstance(node, ast.ClassDef) and name in used and _BASE in read_target(f"{module}.{name}").lineage:
                rows.append((name, _some(used[name]), _summary(file.read_text(encoding="utf-8"))))
    return [("algorithm", "recipes", "what it is"), *sorted(rows)], None


def _some(recipes: Sequence[str]) -> str:
    """The first recipes: those of the worlds before the others, and of these the usual ones first."""
    ordered = sorted(
        recipes, key=lambda name: (not name.startswith(WORLDS), name.rsplit("/", 1)[1] not in _USUAL, name)
    )
    more = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _summary(source: str) -> str:
    """The first paragraph of a module's docstring."""
    return " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())


def _write_table(rows: Sequence[Row]) -> None:
    """Columns as wide as their longest cell; the last one runs free."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


LISTS: dict[str, Callable[[], Table]] = {
    "recipes": _recipes,
    "worlds": _worlds,
    "algorithms": _algorithms,
    "rewards": _rewards,
}
