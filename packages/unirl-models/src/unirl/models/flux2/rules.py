"""Guidance that FLUX.2 dev takes: a scale as an input, none by a second forward. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.models.guidance_rules import folder_value, inputs_of, no_guidance
from unirl.types.recipe import Messages, Part, Run


def guidance_is_taken(own: Part, run: Run) -> Messages:
    """By the checkpoint's own configuration where it lies on this machine."""
    yield from inputs_of(own, run, takes=folder_value(own, "transformer/config.json", "guidance_embeds") is not False)
    yield from no_guidance(own, run, "sampling.distilled_guidance_scale")


RULES = (guidance_is_taken,)
