"""Evaluation mode without gradients, for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from unirl.types.protocols.models import ModelBundle


@contextmanager
def evaluating(bundle: ModelBundle) -> Generator[None]:
    """Evaluation mode without gradients; each submodule of what trains gets its own mode back afterwards."""
    modes = [(module, module.training) for root in bundle.trainable_modules().values() for module in root.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training
