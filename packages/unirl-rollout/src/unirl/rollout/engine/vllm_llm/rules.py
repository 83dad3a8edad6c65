"""Rules of vLLM about the recipe and this machine. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.engine.served_text.rules import model_is_served
from unirl.rollout.engine.tensor_parallel import heads_divide
from unirl.types.device_kinds import kind_of
from unirl.types.recipe import Messages, Part, Run


def adapters_in_float32(at: str, rank: object) -> str:
    """Message: the engine at `at` takes no adapters in float32 on an accelerator."""
    return (
        f"{at}.dtype = fp32 with {at}.max_lora_rank = {rank}, but vLLM's adapters on a GPU need bf16 or fp16. Set "
        f"{at}.dtype: bf16, or push whole weights, in which adapters are merged: {at}.max_lora_rank: null, "
        "sync._target_: unirl.distributed.weight_sync.full.FullWeightSync."
    )


def adapters_have_kernels(own: Part, run: Run) -> Messages:
    """vLLM multiplies adapters in the dtype of its model, for which it has kernels."""
    rank = own.get("max_lora_rank")
    if rank is not None and own.get("dtype") == "fp32" and kind_of(run.device).is_accelerator:
        yield adapters_in_float32(own.at, rank)


RULES = (adapters_have_kernels, model_is_served)
MACHINE_RULES = (heads_divide,)
