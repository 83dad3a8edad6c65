"""What an SGLang server needs of the rest of a recipe and of this machine. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.engine.child.rules import environment_exists
from unirl.types.recipe import Messages, Part, Run


def adapters_need_a_gpu(at: str, rank: object) -> str:
    """Why the engine at `at` takes no adapters on a CPU, and what to do."""
    return (
        f"{at}.max_lora_rank = {rank}, but SGLang's adapters need a GPU. Push whole weights, in which adapters are "
        f"merged: {at}.max_lora_rank: null, sync._target_: unirl.distributed.weight_sync.full.FullWeightSync."
    )


def adapters_are_served(own: Part, run: Run) -> Messages:
    """A server that is started on a CPU takes whole weights."""
    rank = own.get("max_lora_rank")
    if run.device == "cpu" and own.get("url") is None and rank is not None:
        yield adapters_need_a_gpu(own.at, rank)


RULES = (adapters_are_served,)
MACHINE_RULES = (environment_exists,)
