"""The suites by name."""

from __future__ import annotations

from unirl.config.suggestions import did_you_mean
from unirl.suites.shapes import SHAPES
from unirl.suites.suite import Suite
from unirl.types.errors import ConfigError

SUITES: dict[str, Suite] = {suite.name: suite for suite in (SHAPES,)}


def chosen_suite(name: str) -> Suite:
    """The suite of a name. Raises ConfigError with the nearest names."""
    if name not in SUITES:
        raise ConfigError(f"unknown suite {name!r}. {did_you_mean(name, SUITES)} There are: {', '.join(SUITES)}.")
    return SUITES[name]
