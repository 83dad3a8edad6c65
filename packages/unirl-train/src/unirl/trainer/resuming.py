"""Checks what may not change silently between a checkpoint and the run that continues it.

Samples, rewards and advantages before and after a resume appear in the same curves and tables. If the settings behind
them have changed, the run is refused, or with `resume_changes: allow` it continues and reports each change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl.config.former import modernised
from unirl.config.instantiation import TARGET
from unirl.config.runs import does_train, policy_sections
from unirl.train.checkpoint.saved import DRIVER_STATE, newest_driver_state
from unirl.types.errors import CheckpointError

COMPARED = ("seed", "reward", "data", "sampling", "advantages", "selection", "scouts")
"""Sections of a recipe that determine what is sampled and how it is scored."""
OF_COMPARED_STAGE = ("policy", "grows_from", "reads", "sampling", "advantages")
"""Keys of a stage that determine it."""
_FREE = ("data.path", "reward.is_async", "reward.pool")
"""Free to change: a data source compares the rows, not their path, and asynchronous scoring gives the same rewards."""
MAX_SHOWN = 6

Recipe = Mapping[str, Any]  # Any: a recipe's values
Changes = dict[str, list[Any]]  # Any: as above
"""Key of the recipe -> [old value, new value]; None if absent."""
Digests = Mapping[str, str]
"""Key of the recipe -> digest of its value, for values that are not stored."""


def check_same_algorithm(saved: Recipe, own: Recipe) -> None:
    """Raise CheckpointError if another algorithm would continue a run. Both recipes are resolved or published."""
    before, now = _algorithms(modernised(saved)), _algorithms(own)
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


def digests_of(recipe: Recipe, published: Recipe) -> dict[str, str]:
    """Digests of the compared values that `published` (`unirl.config.recipes.published`) does not show."""
    values, shown = _values(recipe), _values(published)
    keys = [key for key in dict.fromkeys([*shown, *values]) if shown.get(key) != values.get(key)]
    return {key: _digest(key, values.get(key)) for key in keys}


def changed_settings(
    saved: Recipe, own: Recipe, saved_digests: Digests | None = None, own_digests: Digests | None = None
) -> Changes:
    """The compared keys that differ between two published recipes, with their digests."""
    before, now = _values(modernised(saved)), _values(own)
    changes: Changes = {}
    for key in dict.fromkeys([*before, *now]):
        pair = [before.get(key), now.get(key)]
        digests = [(saved_digests or {}).get(key), (own_digests or {}).get(key)]
        if any(digests):
            first, second = (known or _digest(key, value) for known, value in zip(digests, pair, strict=True))
            if first != second:
                changes[key] = pair if pair[0] != pair[1] else [pair[0], f"{pair[1]}, with another value"]
        elif pair[0] != pair[1]:
            changes[key] = pair
    return changes


def _values(recipe: Recipe) -> dict[str, Any]:  # Any: as in Recipe
    return {key: value for place in _compared(recipe) for key, value in place if key not in _FREE}


def _digest(key: str, value: Any) -> str:  # Any: as in Recipe
    """Slow on purpose, so that short passwords cannot be found by brute force."""
    text = json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.scrypt(text, salt=key.encode(), n=2**14, r=8, p=1, dklen=16).hex()


def _compared(recipe: Recipe) -> Iterator[Iterator[tuple[str, Any]]]:  # Any: as in Recipe
    """The compared leaves, by section; for stages and policies how they sample, and the model of policies that are not
    trained."""
    yield from (_leaves(section, recipe.get(section)) for section in COMPARED)
    for track, stage in (recipe.get("stages") or {}).items():
        yield from (_leaves(f"stages.{track}.{key}", stage.get(key)) for key in OF_COMPARED_STAGE)
    for prefix, sections in policy_sections(recipe).values():
        if prefix:
            yield from (_leaves(f"{prefix}{key}", sections.get(key)) for key in ("sampling", "advantages"))
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


def check_resume(recipe: Recipe, run_dir: Path, published: Recipe | None = None) -> None:
    """Raise CheckpointError if this recipe may not continue the newest checkpoint. Checked before models load."""
    state = newest_driver_state(run_dir / "checkpoints")
    if state is not None:
        shown = recipe if published is None else published
        if not isinstance(state.get("config"), Mapping):
            raise CheckpointError(
                f"{DRIVER_STATE} of the newest checkpoint in {run_dir} has no recipe (`config`). Remove that folder "
                "of checkpoints/ to resume from the one before it."
            )
        check_same_algorithm(state["config"], shown)
        own_digests = digests_of(recipe, shown)
        refuse_changes(changed_settings(state["config"], shown, state.get("digests"), own_digests), recipe)


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
