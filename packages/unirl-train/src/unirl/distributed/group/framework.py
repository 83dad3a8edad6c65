"""The one place that imports ray, so that a run in one process works without it."""

from __future__ import annotations

from types import ModuleType

from unirl.types.errors import ConfigError


def ray_module() -> ModuleType:
    """The ray module. Raises ConfigError naming the extra to install if it is missing."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            f"runtime ray needs Ray, which cannot be imported ({error}). "
            "Install it with `pip install 'unirl-train[ray]'`, or choose `runtime: local`."
        ) from error
    return ray
