"""What DMD2 with a learnt reward needs in addition to DMD2. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.algorithms.dmd2_rules import is_below_max_level, negative_prompt_is_there
from unirl.types.recipe import Messages, Part, Run


def reward_levels_are_in_order(own: Part, run: Run) -> Messages:
    """Noise levels of the learnt reward are drawn from an interval."""
    yield from is_below_max_level(own, "reward_min_level")


def surrogate_can_be_guided(own: Part, run: Run) -> Messages:
    """A guided surrogate reads a negative prompt."""
    yield from negative_prompt_is_there(own, run, "surrogate_guidance")


RULES = (reward_levels_are_in_order, surrogate_can_be_guided)
