"""What a diffusers pipeline needs of the size of its images. See `unirl.types.recipe`."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.types.recipe import Messages, Part, Run

LATENT_DIVISOR = 16
"""Pixels that a side must divide into where the checkpoint cannot be read yet: a VAE of 8 and patches of 2, or more."""


def image_divides(own: Part, run: Run) -> Messages:
    """Height and width divide into latent patches."""
    divisor = _latent_divisor(own.node.get("pretrained_model"))
    for name in ("height", "width"):
        value = run.sampling.node.get(name)
        if isinstance(value, int) and value % divisor:
            nearest = max(divisor, round(value / divisor) * divisor)
            yield f"sampling.{name} = {value} is not divisible by {divisor}. The nearest that is: {nearest}."


def _latent_divisor(model: str | None) -> int:
    """Pixels per latent patch, from the checkpoint's own configuration where it lies on this machine."""
    if model is None:
        return LATENT_DIVISOR
    folder = Path(model).expanduser()
    try:
        vae = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
        transformer = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
        return int(2 ** (len(vae["block_out_channels"]) - 1) * transformer["patch_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return LATENT_DIVISOR  # `unirl.models.rules.model_exists` says what is wrong with the folder


RULES = (image_divides,)
