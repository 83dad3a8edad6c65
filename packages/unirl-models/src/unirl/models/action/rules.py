"""What a policy that acts needs. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def one_source(own: Part, run: Run) -> Messages:
    """Weights come from a checkpoint, or are made at random."""
    given = [key for key in ("pretrained_model", "config") if own.node.get(key) is not None]
    if len(given) != 1:
        what = "both are set" if given else "both are missing"
        yield (
            f"{own.at}.pretrained_model and {own.at}.config: {what}. Give the folder of a checkpoint, or the shape "
            "of a policy with random weights."
        )


def no_adapters(own: Part, run: Run) -> Messages:
    """Small policies train whole."""
    backend = run.policy_of(own).backend
    if backend.get("lora") is not None:
        yield f"{backend.at}.lora: {own.name} has no layers for adapters. Set lora: null."


RULES = (one_source, no_adapters)
