"""Recipes written before keywords were renamed, such as those in the folders of earlier runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.config.signatures import read_target
from unirl.types.errors import ConfigError
from unirl.types.recipe import TARGET
from unirl.types.renamed import RENAMED, present_keywords


def in_present_words(value: Any, at: str = "") -> Any:  # Any: a recipe's values
    """A recipe, or what stands in it at `at`, with every keyword under its present name.

    Classes say by RENAMED which they renamed. Raises ConfigError for an old name beside the new one.
    """
    if isinstance(value, Mapping):
        prefix = f"{at}." if at else ""
        inner = {key: in_present_words(item, f"{prefix}{key}") for key, item in value.items()}
        renamed = _renamed_by(inner.get(TARGET))
        return inner if not renamed.keys() & inner.keys() else present_keywords(inner, renamed, at)
    if isinstance(value, list):
        return [in_present_words(item, f"{at}[{place}]") for place, item in enumerate(value)]
    return value


def _renamed_by(target: object) -> Mapping[str, Any]:  # Any: see RENAMED
    try:
        renamed = read_target(target).constants.get(RENAMED) if isinstance(target, str) else None
    except ConfigError:
        return {}  # the check of signatures says what is wrong with it
    return renamed if isinstance(renamed, Mapping) else {}
