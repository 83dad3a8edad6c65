"""Guidance that a checkpoint of HunyuanVideo takes as an input. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.models.guidance_rules import folder_value, inputs_of
from unirl.types.recipe import Messages, Part, Run

WITHOUT_INPUT = "hunyuanvideo-community/HunyuanVideo-I2V-33ch"


def guidance_is_taken(own: Part, run: Run) -> Messages:
    """By the checkpoint's own configuration where it lies on this machine, else by its name on the hub."""
    embeds = folder_value(own, "transformer/config.json", "guidance_embeds")
    takes = own.node.get("pretrained_model") != WITHOUT_INPUT if embeds is None else bool(embeds)
    yield from inputs_of(own, run, takes=takes)


RULES = (guidance_is_taken,)
