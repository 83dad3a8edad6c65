"""Guidance that a checkpoint of FLUX.1 takes: dev, Kontext and Fill as an input, schnell none. See
`unirl.types.recipe`."""

from __future__ import annotations

from unirl.models.guidance_rules import folder_value, inputs_of, no_guidance
from unirl.types.recipe import Messages, Part, Run

SCHNELL = "black-forest-labs/FLUX.1-schnell"


def guidance_is_taken(own: Part, run: Run) -> Messages:
    """By the checkpoint's own configuration where it lies on this machine, else by its name on the hub."""
    embeds = folder_value(own, "transformer/config.json", "guidance_embeds")
    takes = own.node.get("pretrained_model") != SCHNELL if embeds is None else bool(embeds)
    yield from inputs_of(own, run, takes=takes)
    if not takes:
        yield from no_guidance(own, run, "FLUX.1-dev")
    elif not own.ability("takes_second_forward"):
        yield from no_guidance(own, run, "sampling.distilled_guidance_scale")


RULES = (guidance_is_taken,)
