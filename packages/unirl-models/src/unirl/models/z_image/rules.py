"""Guidance that a checkpoint of Z-Image takes: Turbo takes none, and nothing in its folder says so. See
`unirl.types.recipe`."""

from __future__ import annotations

from unirl.models.guidance_rules import no_guidance
from unirl.types.recipe import Messages, Part, Run

BASE_CHECKPOINT = "the base checkpoint (Z-Image)"
TURBO = "Tongyi-MAI/Z-Image-Turbo"


def turbo_is_said(own: Part, run: Run) -> Messages:
    """The published Turbo is called distilled."""
    if own.node.get("pretrained_model") == TURBO and not own.get("is_distilled", False):
        yield f"{own.at}.is_distilled = false, but {TURBO} is distilled. Set {own.at}.is_distilled: true."


def guidance_is_taken(own: Part, run: Run) -> Messages:
    """Where the recipe calls the checkpoint distilled."""
    if own.get("is_distilled", False):
        yield from no_guidance(own, run, BASE_CHECKPOINT)


RULES = (turbo_is_said, guidance_is_taken)
