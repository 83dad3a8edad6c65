"""What environments of policies that act need. See `unirl.types.recipe`."""

from __future__ import annotations

import importlib.util

from unirl.types.recipe import Machine, Messages, Part, Run


def gymnasium_is_there(own: Part, run: Run, machine: Machine) -> Messages:
    """What names an environment of gymnasium finds the library, and the environment in it."""
    if not own.ability("is_gymnasium"):
        return
    if importlib.util.find_spec("gymnasium") is None:
        yield f"{own.at}: {own.name} needs gymnasium. Install it with: pip install 'unirl-rollout[gymnasium]'"


RULES = ()
MACHINE_RULES = (gymnasium_is_there,)
