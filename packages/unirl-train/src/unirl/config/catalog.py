"""Lists the packaged recipes. Reads only file names and comments."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from importlib.resources.abc import Traversable

from unirl.config.suggestions import nearest
from unirl.types.errors import ConfigError

RECIPES_MODULE = "unirl.recipes"
SUFFIXES = (".yaml", ".yml")
PARTS = "parts"
"""Folder of the package whose files are building blocks, not recipes."""


def available(module: str = RECIPES_MODULE) -> dict[str, str]:
    """Packaged recipes: name -> description (the comment at the top of the file)."""
    root = importlib.resources.files(module)
    found: dict[str, str] = {}
    for folder in root.iterdir():
        if folder.is_dir() and folder.name != PARTS:
            for file in _yaml_files(folder, folder.name):
                found[file[0]] = _description(file[1].read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def parts(module: str = RECIPES_MODULE) -> list[str]:
    """Names of the building blocks, such as parts/train/lora."""
    root = importlib.resources.files(module)
    return sorted(name for name, _ in _yaml_files(root / PARTS, PARTS))


def is_packaged(recipe: str, module: str = RECIPES_MODULE) -> bool:
    """True if `packaged_name` finds the recipe."""
    return len(_meant(recipe, list(available(module)))) == 1


def packaged_name(recipe: str, module: str = RECIPES_MODULE) -> str:
    """The full name of a packaged recipe; its first folders may be omitted if the rest is unique. Raises
    ConfigError."""
    names = list(available(module))
    meant = _meant(recipe, names)
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ConfigError(f"recipe {recipe!r} may be any of {', '.join(meant)}. Write more of its name.")
    length = recipe.count("/") + 1
    known = [*names, *("/".join(name.split("/")[-length:]) for name in names)]
    # Written whole, as `trainer list` has them, also where a short name is nearest.
    near = dict.fromkeys(name for short in nearest(recipe, known) for name in _meant(short, names))
    hint = f" Did you mean {' or '.join(list(near)[:3])}?" if near else ""
    raise ConfigError(
        f"unknown recipe {recipe!r}.{hint} There is no folder of a run of this name either. "
        "Recipes: uv run trainer list"
    )


def _meant(recipe: str, names: Sequence[str]) -> list[str]:
    return [recipe] if recipe in names else [name for name in names if name.endswith(f"/{recipe}")]


def _yaml_files(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found.extend(_yaml_files(entry, f"{prefix}/{entry.name}"))
        elif entry.name.endswith(SUFFIXES):
            found.append((f"{prefix}/{entry.name.rsplit('.', 1)[0]}", entry))
    return found


def _description(text: str) -> str:
    """The leading comment lines without package directives."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @"):
            lines.append(line.lstrip("# ").strip())
    return " ".join(lines)
