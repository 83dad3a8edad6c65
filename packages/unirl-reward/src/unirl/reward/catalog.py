"""Every scorer that comes with the package, found by the card that its class holds. Imports no torch.

Selection is by `_target_`; this is for people who choose, for `trainer list rewards`, and for servers that take names.
Modules of scorers import torch and model libraries, so cards are read from their source.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unirl.reward.card import Normalisation, ScorerCard
from unirl.types.errors import ConfigError

_CLASSES = {cls.__name__: cls for cls in (ScorerCard, Normalisation)}


def cards_in(folder: Path, package: str) -> dict[str, ScorerCard]:
    """Name -> card of every class below a folder that has one, sorted by name.

    package: dotted path of the folder.
    Raises ConfigError for a card that is not literal or has no name, and for two cards of one name.
    """
    found: dict[str, ScorerCard] = {}
    for path in sorted(folder.rglob("*.py")):
        module = ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        for card in _cards_of(path, module):
            if not card.name:
                raise ConfigError(f"{card.target}: its card has no name. Give it the default of the keyword `name`.")
            if card.name in found:
                raise ConfigError(f"{found[card.name].target} and {card.target} are both called {card.name!r}.")
            found[card.name] = card
    return dict(sorted(found.items()))


def _cards_of(path: Path, module: str) -> Iterator[ScorerCard]:
    source = path.read_bytes()
    if b"ScorerCard(" not in source:  # parsing every file would take most of the time
        return
    for owner in ast.parse(source, filename=str(path)).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in owner.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                names = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(name, ast.Name) and name.id == "card" for name in names):
                    yield _card(node.value, f"{module}.{owner.name}")


def _card(node: ast.expr, target: str) -> ScorerCard:
    try:
        return dataclasses.replace(_evaluated(node), target=target)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{target}: its card must be ScorerCard(...) of literals: {error}") from error


def _evaluated(node: ast.expr) -> Any:  # Any: a literal, or an object of _CLASSES
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CLASSES:
        keywords = {str(keyword.arg): _evaluated(keyword.value) for keyword in node.keywords}
        return _CLASSES[node.func.id](*map(_evaluated, node.args), **keywords)
    return ast.literal_eval(node)


CATALOG: dict[str, ScorerCard] = cards_in(Path(__file__).parent, "unirl.reward")
"""Name -> card. The name is also what the scorer is called unless told otherwise."""


def named_as(target: str) -> str | None:
    """Name of the scorer with this dotted path, None where the package does not ship it."""
    return next((name for name, card in CATALOG.items() if card.target == target), None)
