"""How random pipelines of diffusers are written as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def save_random(make: Callable[[], Any], folder: Path) -> None:
    """Write the pipeline that `make` makes after torch's seed 0. Any: a class of diffusers.

    The matrices of its transformers are doubled, or a random model hardly looks at its text.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = make()
    with torch.no_grad():
        for component in ("transformer", "transformer_2"):
            transformer = pipeline.components.get(component)
            for name, parameter in [] if transformer is None else transformer.named_parameters():
                if name.endswith("weight") and parameter.dim() == 2:
                    parameter.mul_(2.0)
    pipeline.save_pretrained(folder)
