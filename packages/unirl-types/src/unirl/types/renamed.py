"""Keywords that have another name now. For one release the old one is taken, with a message."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from unirl.types.errors import ConfigError

logger = logging.getLogger(__name__)

RENAMED = "renamed_keywords"
"""Class attribute, a literal: old keyword -> the new one; -> (the new one, {old value: new value}); or -> None for one
that has no successor and is dropped."""

Renamed = Mapping[str, Any]  # Any: see RENAMED


def present_keywords(given: Mapping[str, Any], renamed: Renamed, at: str) -> dict[str, Any]:  # Any: keywords
    """The keywords `given` under their present names, in their order; logs a message per old one.

    at: their place in the recipe. Raises ConfigError if both an old keyword and its new name are given.
    """
    present: dict[str, Any] = {}
    for name, value in given.items():
        if name not in renamed:
            present[name] = value
            continue
        new, values = renamed[name] if isinstance(renamed[name], (tuple, list)) else (renamed[name], {})
        if new is None:
            say_once(f"{at}.{name} does nothing any more. Remove it: the next release refuses it.")
            continue
        if new in given or new in present:
            raise ConfigError(f"{at}.{name} is the old name of {at}.{new}, and both are set. Remove the first.")
        say_once(f"{at}.{name} is called {at}.{new} now. Rename it: the next release refuses it.")
        present[new] = values.get(value, value) if isinstance(value, (str, int)) else value
    return present


_said: set[str] = set()


def say_once(line: str) -> None:
    """Log a warning, once per process."""
    if line not in _said:
        _said.add(line)
        logger.warning("%s", line)
