"""Guidance that a checkpoint of FLUX.2 Klein takes: none where it is distilled. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.models.guidance_rules import folder_value, no_guidance
from unirl.types.recipe import Messages, Part, Run

BASE_CHECKPOINTS = "a base checkpoint (FLUX.2-klein-base-4B, -9B)"
DISTILLED = ("black-forest-labs/FLUX.2-klein-4B", "black-forest-labs/FLUX.2-klein-9B")


def guidance_is_taken(own: Part, run: Run) -> Messages:
    """By the checkpoint's own index where it lies on this machine, else by its name on the hub."""
    if own.node.get("pretrained_model") in DISTILLED or folder_value(own, "model_index.json", "is_distilled"):
        yield from no_guidance(own, run, BASE_CHECKPOINTS)


RULES = (guidance_is_taken,)
