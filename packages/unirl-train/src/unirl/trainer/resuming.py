"""What may not change silently between a checkpoint and the run that continues it.

Samples, rewards and advantages before and after a resume are compared in one curve and one table. Where what makes them
has changed, the run is refused, or with `resume_changes: allow` continues and reports each change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl.config.instantiation import TARGET
from unirl.config.runs import does_train, policy_sections
from unirl.train.checkpoint import newest_driver_state
from unirl.types.errors import CheckpointError

COMPARED = ("seed", "reward", "data", "sampling", "advantages", "selection")
"""Sections of a recipe that say what is sampled and how it is judged."""
_FREE = ("data.path", "reward.is_async")
"""A data source compares the rows themselves, wherever they lie; asynchronous scoring gives the same rewards."""
MAX_SHOWN = 6

Recipe = Mapping[str, Any]  # Any: a recipe's values
Changes = dict[str, list[Any]]  # Any: as above
"""Key of the recipe -> what it was and what it is now; None where it is absent."""


def check_same_algorithm(saved: Recipe, own: Recipe) -> None:
    """Raise CheckpointError where a run would be continued by another algorithm; both are resolved recipes."""
    before, now = _algorithms(saved), _algorithms(own)
    for place in dict.fromkeys([*before, *now]):
        if before.get(place) != now.get(place):
            where = "" if place == "algorithm" else f" for {place}"
            raise CheckpointError(
                f"the checkpoint was saved by algorithm {before.get(place)}{where}, this recipe has {now.get(place)}. "
                "Resume with the algorithm that it was saved with, or start a new run."
            )


def _algorithms(recipe: Recipe) -> dict[str, str]:
    """Place in the recipe -> import path."""
    found: dict[str, str] = {}
    for prefix, sections in policy_sections(recipe).values():
        if not does_train(prefix, sections):
            continue
        several = {f"algorithms.{track}": node for track, node in (sections.get("algorithms") or {}).items()}
        for key, node in {"algorithm": sections.get("algorithm"), **several}.items():
            if node:
                found[f"{prefix}{key}"] = str(node.get(TARGET))
    return found


def changed_settings(saved: Recipe, own: Recipe) -> Changes:
    """The compared keys that differ between two resolved recipes."""
    before, now = ({key: value for place in _compared(recipe) for key, value in place} for recipe in (saved, own))
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in _FREE and before.get(key) != now.get(key)]
    return {key: [before.get(key), now.get(key)] for key in keys}


def _compared(recipe: Recipe) -> Iterator[Iterator[tuple[str, Any]]]:  # Any: as in Recipe
    """The compared leaves, by section; of policies their own advantages (their sampling is the run's), and the model of
    one that does not train."""
    yield from (_leaves(section, recipe.get(section)) for section in COMPARED)
    for prefix, sections in policy_sections(recipe).values():
        if prefix:
            yield _leaves(f"{prefix}advantages", sections.get("advantages"))
        if not does_train(prefix, sections):
            yield _leaves(f"{prefix}bundle", sections.get("bundle"))


def refuse_changes(changes: Changes, own: Recipe) -> None:
    """Raise CheckpointError for changes that the recipe does not allow."""
    if changes and own.get("resume_changes") != "allow":
        raise CheckpointError(
            f"the checkpoint was trained with other settings: {'; '.join(described(changes))}. What comes before and "
            "after would not compare. Set them back to continue, or start a new run; or set resume_changes=allow, "
            "which continues, keeps both recipes and reports the changes."
        )


def check_resume(recipe: Recipe, run_dir: Path) -> None:
    """Raise CheckpointError for a run that the newest checkpoint refuses to be continued by, before models load."""
    state = newest_driver_state(run_dir / "checkpoints")
    if state is not None:
        check_same_algorithm(state["config"], recipe)
        refuse_changes(changed_settings(state["config"], recipe), recipe)


def described(changes: Changes) -> list[str]:
    """One line per change, the first few of many."""
    lines = [f"{key}: {json.dumps(before)} -> {json.dumps(now)}" for key, (before, now) in changes.items()]
    left = len(lines) - MAX_SHOWN
    return lines if left <= 0 else [*lines[:MAX_SHOWN], f"and {left} more"]


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:  # Any: as in Recipe
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{place}.{key}", item)
    elif value is not None:
        yield place, value
