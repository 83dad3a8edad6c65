"""Versions of the packages that a result depends on."""

from __future__ import annotations

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """Versions of the packages that a result depends on."""
    names = ("torch", "diffusers", "transformers", "peft", "ray", "numpy")
    ours = ("types", "sde", "models", "train", "rollout", "reward", "trainer")
    found = {"python": platform.python_version()}
    for name in (*names, *(f"unirl-{part}" for part in ours)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
