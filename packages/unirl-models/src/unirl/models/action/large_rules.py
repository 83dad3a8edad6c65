"""What a large policy that acts needs. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def adapted_layers_are_named_whole(own: Part, run: Run) -> Messages:
    """Frozen parts have layers whose names end as those that train, and gradients do not reach them."""
    backend = run.policy_of(own).backend
    names = (backend.get("lora") or {}).get("target_modules") or ()
    if short := [name for name in names if "." not in str(name)]:
        yield (
            f"{backend.at}.lora.target_modules names {short}, with which layers of parts that are frozen end too. Give "
            "whole names of layers, or remove it: then all linear layers of what trains have adapters."
        )


RULES = (adapted_layers_are_named_whole,)
