"""Names of the last release in recipes: renamed classes and keywords are accepted once more, with a message.

What stays here longer than one release is removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from unirl.config.former_stages import to_stages
from unirl.types.errors import ConfigError
from unirl.types.recipe import TARGET

logger = logging.getLogger(__name__)

Node = dict[str, Any]  # Any: a recipe's values

EVALUATION = "unirl.trainer.evaluation.EvaluationConfig"
CLASSES: Mapping[str, str] = {
    "unirl.trainer.text_evaluation.TextEvaluationConfig": EVALUATION,
    "unirl.trainer.composed_evaluation.ComposedEvaluationConfig": EVALUATION,
}
"""Import path of the last release -> the present one."""
KEYWORDS: Mapping[str, Mapping[str, str]] = {}
"""Present import path -> keyword of the last release -> the present one."""
FORMER_COUNTS = ("num_images", "num_completions")
"""Keys of `eval` that said how many samples of an evaluation are shown."""


def _options_of_evaluations(recipe: Node) -> list[str]:
    evaluation = dict(recipe.get("eval") or {})
    if evaluation.get(TARGET, EVALUATION) != EVALUATION:
        return []
    samples = dict(recipe.get("samples") or {})
    moves = [(key, samples, "samples", "per_evaluation") for key in FORMER_COUNTS]
    moves.append(("top_p", evaluation, "eval", "pass_top_p"))
    if str((recipe.get("sampling") or {}).get(TARGET)).endswith(".ARSamplingParams"):
        moves.append(("temperature", evaluation, "eval", "pass_temperature"))
    lines = []
    for old, section, name, new in moves:
        if old not in evaluation:
            continue
        if section.get(new) is not None:
            raise ConfigError(f"eval.{old} is called {name}.{new} now, and both are set. Remove eval.{old}.")
        section[new] = evaluation.pop(old)
        lines.append(f"eval.{old} is called {name}.{new} now.")
    if lines:
        recipe.update(eval=evaluation, **({"samples": samples} if samples else {}))
    return lines


MOVES: tuple[Callable[[Node], list[str]], ...] = (to_stages, _options_of_evaluations)
"""Functions that move sections of a recipe, in place, each returning a line per change."""

_said: set[str] = set()


def modernised(recipe: Mapping[str, Any]) -> Node:  # Any: as in Node
    """A copy of a resolved recipe with present names; each change is logged once per process.

    Raises ConfigError where an old name and its present one are both there.
    """
    made = {key: _renamed(value, str(key)) for key, value in recipe.items()}
    for move in MOVES:
        for line in move(made):
            _say(line)
    return made


def _renamed(value: Any, at: str) -> Any:  # Any: as in Node
    if isinstance(value, list):
        return [_renamed(item, f"{at}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    node = {str(key): _renamed(item, f"{at}.{key}") for key, item in value.items()}
    path = str(node.get(TARGET))
    if path in CLASSES:
        _say(f"{at}.{TARGET}: {path} is {CLASSES[path]} now.")
        node[TARGET] = path = CLASSES[path]
    for old, new in KEYWORDS.get(path, {}).items():
        if old not in node:
            continue
        if new in node:
            raise ConfigError(f"{at}.{old} is called {at}.{new} now, and both are set. Remove {at}.{old}.")
        _say(f"{at}.{old} is called {at}.{new} now.")
        node[new] = node.pop(old)
    return node


def _say(line: str) -> None:
    if line not in _said:
        _said.add(line)
        logger.warning("%s This release still takes the old name; change the recipe.", line)
