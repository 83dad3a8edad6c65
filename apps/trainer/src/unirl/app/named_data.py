"""Which prompts packaged recipes name, read from their files: composing all of them would take half a minute."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from typing import Any

import yaml

from unirl.config.catalog import RECIPES_MODULE, available
from unirl.datasets.catalog import FOLDER, set_of
from unirl.datasets.records import PromptSet

PLACES = (("data", "path"), ("eval", "prompts"))
"""Where a recipe names prompts."""
_MADE = re.compile(rf"{FOLDER}/[\w./-]+")
_SELF, _OVERRIDE, _OPTIONAL, _GLOBAL = "_self_", "override ", "optional ", "_global_"


def recipes_of(prompt_set: PromptSet) -> list[str]:
    """Packaged recipes that name a file of the set, where no variable names another."""
    return [name for name in available() if any(set_of(path) is prompt_set for path in named_data(name))]


def named_data(recipe: str) -> list[str]:
    """Paths below `datasets` that a packaged recipe names, without what its environment variables would change."""
    values: dict[str, str] = {}
    _read(recipe, values, {})
    return [match[0] for value in values.values() if (match := _MADE.search(value))]


def data_paths(recipe: Mapping[str, Any]) -> list[str]:  # Any: a recipe's values
    """The prompts that a resolved recipe names."""
    named = ((recipe.get(section) or {}).get(key) for section, key in PLACES)
    return [str(path) for path in named if path is not None]


def _read(name: str, values: dict[str, str], chosen: dict[str, str]) -> None:
    """Add what a file and those of its defaults say, in the order in which they override one another.

    chosen: parts that an outer file has chosen instead of those that the defaults name.
    """
    file = importlib.resources.files(RECIPES_MODULE) / f"{name.strip('/')}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    defaults = content.get("defaults", [_SELF])
    parts = [next(iter(entry.items())) for entry in defaults if isinstance(entry, Mapping)]
    overridden = {kind.removeprefix(_OVERRIDE): part for kind, part in parts if kind.startswith(_OVERRIDE)}
    chosen = {**overridden, **chosen}
    for entry in defaults:
        if entry == _SELF:
            for section, key in PLACES:
                if key in (content.get(section) or {}):
                    values[section] = str(content[section][key])
        elif isinstance(entry, str):
            _read_if_global(entry, values, chosen)
        else:
            ((kind, part),) = entry.items()
            if not kind.startswith((_OVERRIDE, _OPTIONAL)):  # optional parts are of engines
                place, at, package = kind.partition("@")
                _read_if_global(f"{place}/{chosen.get(kind, part)}{at}{package}", values, chosen)


def _read_if_global(name: str, values: dict[str, str], chosen: dict[str, str]) -> None:
    """Read a part; one that goes into a section of the recipe (`part@section`) names no prompts."""
    place, _, package = name.partition("@")
    if package in ("", _GLOBAL):
        _read(place, values, chosen)
