"""Parameters that a module has under several names."""

from __future__ import annotations

from torch import nn


def ties_of(module: nn.Module) -> dict[str, str]:
    """Other names of a parameter -> its first."""
    first: dict[nn.Parameter, str] = {}
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (other := first.setdefault(parameter, name)) != name:
            found[name] = other
    return found
