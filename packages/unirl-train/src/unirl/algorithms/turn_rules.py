"""What an algorithm on the rewards of turns needs of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.algorithms.action_rules import rewards_are_plain
from unirl.types.recipe import Messages, Part, Run


def turns_are_taken(own: Part, run: Run) -> Messages:
    """Its track has rewards of turns."""
    if all(stage.turns is None for stage in run.stages):
        yield f"{own.at}: {own.name} needs the rewards of turns, and there are no turns. Add turns, or take ARPPO."


RULES = (turns_are_taken, rewards_are_plain)
