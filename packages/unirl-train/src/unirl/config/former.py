"""Accepts names of the last release in recipes: renamed classes and keywords work for one more release, with a message.

Entries are removed after one release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unirl.config.former_stages import to_stages
from unirl.config.signatures import read_target
from unirl.types.errors import ConfigError
from unirl.types.recipe import TARGET
from unirl.types.renamed import RENAMED, present_keywords, say_once

Node = dict[str, Any]  # Any: a recipe's values

EVALUATION = "unirl.trainer.evaluation.EvaluationConfig"
CLASSES: Mapping[str, str] = {
    "unirl.trainer.text_evaluation.TextEvaluationConfig": EVALUATION,
    "unirl.trainer.composed_evaluation.ComposedEvaluationConfig": EVALUATION,
}
"""Import path in the last release -> current import path."""
IMAGE_TOKENS = "unirl.rollout.engine.trainside.image_tokens.TrainsideImageTokenEngine"
"""Engine of images that are drawn by tokens, which the last release did not have."""
FORMER_COUNTS = ("num_images", "num_completions")
"""Old keys of `eval` for the number of samples to show."""


def _options_of_evaluations(recipe: Node) -> list[str]:
    evaluation = dict(recipe.get("eval") or {})
    if evaluation.get(TARGET, EVALUATION) != EVALUATION:
        return []
    samples = dict(recipe.get("samples") or {})
    moves = [(key, samples, "samples", "per_evaluation") for key in FORMER_COUNTS]
    moves.append(("top_p", evaluation, "eval", "pass_top_p"))
    samples_texts = str((recipe.get("sampling") or {}).get(TARGET)).endswith(".ARSamplingParams")
    if samples_texts and (recipe.get("engine") or {}).get(TARGET) != IMAGE_TOKENS:
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
"""Functions that move sections of a recipe in place; each returns one line per change."""

STILL = "This release still takes the old name; change the recipe."


def modernised(recipe: Mapping[str, Any]) -> Node:  # Any: as in Node
    """A copy of a resolved recipe with current names. Each change is logged once per process.

    Raises ConfigError if an old name and its replacement are both present.
    """
    made = {str(key): _everywhere(value, str(key), _present_class) for key, value in recipe.items()}
    for move in MOVES:
        for line in move(made):
            say_once(f"{line} {STILL}")
    return {key: _everywhere(value, key, _with_present_keywords) for key, value in made.items()}


def _everywhere(value: Any, at: str, change: Callable[[Node, str], Node]) -> Any:  # Any: as in Node
    """The value with `change` applied to every mapping in it, inner ones first."""
    if isinstance(value, list):
        return [_everywhere(item, f"{at}[{index}]", change) for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    return change({key: _everywhere(item, f"{at}.{key}", change) for key, item in value.items()}, at)


def _present_class(node: Node, at: str) -> Node:
    path = str(node.get(TARGET))
    if path not in CLASSES:
        return node
    say_once(f"{at}.{TARGET}: {path} is {CLASSES[path]} now. {STILL}")
    return {**node, TARGET: CLASSES[path]}


def _with_present_keywords(node: Node, at: str) -> Node:
    """The node with renamed keywords replaced, as its class declares in RENAMED."""
    path = node.get(TARGET)
    try:
        renamed = read_target(path).constants.get(RENAMED) if isinstance(path, str) else None
    except ConfigError:
        return node  # the check of signatures reports what is wrong with the path
    return present_keywords(node, renamed, at) if isinstance(renamed, Mapping) else node
