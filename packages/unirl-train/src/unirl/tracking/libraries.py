"""The libraries of optional trackers: what imports one, and says how to get it. Imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

LIBRARIES = {
    "unirl.tracking.wandb.WandbTracker": "wandb",
    "unirl.tracking.swanlab.SwanLabTracker": "swanlab",
    "unirl.tracking.mlflow.MlflowTracker": "mlflow",
    "unirl.tracking.trackio.TrackioTracker": "trackio",
    "unirl.tracking.opentelemetry.OpenTelemetryTracker": "opentelemetry.exporter.otlp",
}
"""Tracker -> its library, whose first word is also the extra that installs it."""


def is_installed(library: str) -> bool:
    """True if it can be imported."""
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # nor is what holds it
        return False


def how_to_get(library: str) -> str:
    """A sentence."""
    extra = library.partition(".")[0]
    return (
        f"{extra} is not installed: uv sync --extra {extra} in a clone, or pip install 'unirl-train[{extra}]' "
        "next to installed packages"
    )


def library_of(tracker: str) -> ModuleType:
    """The library of a tracker of LIBRARIES. Raises ImportError with how to get it."""
    library = LIBRARIES[tracker]
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ImportError(how_to_get(library)) from error
