"""The libraries of optional trackers: what imports one, and says how to get it. Imports nothing heavy."""

from __future__ import annotations

import importlib
from types import ModuleType

LIBRARIES = {
    "unirl.tracking.wandb.WandbTracker": ("wandb", "wandb"),
    "unirl.tracking.swanlab.SwanLabTracker": ("swanlab", "swanlab"),
    "unirl.tracking.mlflow.MlflowTracker": ("mlflow", "mlflow"),
    "unirl.tracking.trackio.TrackioTracker": ("trackio", "trackio"),
}
"""Tracker -> its library, and the extra that installs it."""


def how_to_get(library: str, extra: str) -> str:
    """A sentence."""
    return (
        f"{library} is not installed: uv sync --extra {extra} in a clone, or pip install 'unirl-train[{extra}]' next "
        "to installed packages"
    )


def library_of(tracker: str) -> ModuleType:
    """The library of a tracker of LIBRARIES. Raises ImportError with how to get it."""
    library, extra = LIBRARIES[tracker]
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ImportError(how_to_get(library, extra)) from error
