"""File systems of URLs, by fsspec. Imports no torch: recipes are checked with it."""

from __future__ import annotations

from typing import Any

import fsspec

from unirl.types.errors import ConfigError, as_sentence


class MissingLibraryError(ConfigError):
    """fsspec knows this kind of URL, and the library that it needs is not installed."""


def store_of(url: str) -> tuple[Any, str]:  # Any: fsspec types nothing
    """The file system of a URL, and the path on it. Raises MissingLibraryError, and ConfigError for an unknown kind."""
    try:
        store, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingLibraryError(f"save.mirror = {url} needs a library: {as_sentence(error)}") from error
    except ValueError as error:
        raise ConfigError(f"save.mirror = {url} cannot be used: {as_sentence(error)}") from error
    return store, path.rstrip("/")
