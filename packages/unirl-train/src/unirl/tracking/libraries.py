"""The libraries of optional trackers: what imports one, and says how to get it. Imports nothing heavy."""

from __future__ import annotations

import importlib
from types import ModuleType

LIBRARIES = {
    "unirl.tracking.wandb.WandbTracker": "wandb",
    "unirl.tracking.swanlab.SwanLabTracker": "swanlab",
    "unirl.tracking.mlflow.MlflowTracker": "mlflow",
    "unirl.tracking.trackio.TrackioTracker": "trackio",
}
"""Tracker -> its library, which is also the extra that installs it."""


def how_to_get(library: str) -> str:
    """A sentence."""
    return (
        f"{library} is not installed: uv sync --extra {library} in a clone, or pip install 'unirl-train[{library}]' "
        "next to installed packages"
    )


def library_of(tracker: str) -> ModuleType:
    """The library of a tracker of LIBRARIES. Raises ImportError with how to get it."""
    library = LIBRARIES[tracker]
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ImportError(how_to_get(library)) from error
