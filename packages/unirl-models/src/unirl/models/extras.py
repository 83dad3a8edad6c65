"""Frameworks that are optional: where one is missing, the error names the extra that brings it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from unirl.types.errors import as_sentence


@contextmanager
def from_extra(extra: str) -> Generator[None]:
    """Around the imports of a framework. Raises ImportError naming what is missing and `extra`, which installs it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{as_sentence(error)} Install it: pip install 'unirl-models[{extra}]'") from error
