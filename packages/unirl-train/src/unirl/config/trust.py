"""Finds code in a recipe that is not part of UniRL, which the user may not want to run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.config.instantiation import TARGET
from unirl.config.signatures import KEYWORDS_OF, lies_in, read_target
from unirl.types.errors import ConfigError

INTERPRETER = "python"
"""Keyword of engines that names a program to start."""

_OWN_ENVIRONMENT = re.compile(r"environments/[\w-]+/\.venv/bin/python")
"""The interpreter of an environment of this repository, as written in recipes."""

Node = Any  # Any: a recipe holds mappings, lists and scalars, told apart here


def foreign_code(recipe: Mapping[str, Any], folder: Path, interpreters: Sequence[str] = ()) -> list[str]:
    """`place = path` of every class, function and interpreter of a resolved recipe that is not UniRL's. Imports none.

    folder: an import path entry whose modules are not UniRL's, whatever their names.
    interpreters: programs that the user has allowed elsewhere.
    """
    return [f"{place} = {path}" for place, path in _named(recipe, "") if _is_foreign(place, path, folder, interpreters)]


def _named(node: Node, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        code = {TARGET, INTERPRETER, _function_keyword(node)}
        for key, value in node.items():
            inside = f"{place}.{key}" if place else str(key)
            if key in code and value is not None:
                yield inside, str(value)
            else:
                yield from _named(value, inside)
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _named(item, f"{place}[{index}]")


def _function_keyword(node: Mapping[str, Node]) -> object:
    """The keyword with which a class takes a function, such as `function` of FunctionRewardScorer; None if there is
    none."""
    try:
        return read_target(str(node.get(TARGET))).constants.get(KEYWORDS_OF)
    except ConfigError:
        return None  # the check refuses an empty path


def _is_foreign(place: str, path: str, folder: Path, interpreters: Sequence[str]) -> bool:
    if place.rpartition(".")[2] == INTERPRETER:
        return path not in interpreters and _OWN_ENVIRONMENT.fullmatch(path) is None
    parts = path.split(".")
    # `unirl` is a namespace: any folder on the import path can add modules to it.
    return parts[0] != "unirl" or any(lies_in(".".join(parts[:end]), folder) for end in range(2, len(parts)))
