"""Recipe rules of vLLM-Omni. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.rollout.engine.served_latents.rules import (
    experts_switch_as_released,
    family_is_served,
    kernel_is_served,
    sampling_is_served,
)
from unirl.types.recipe import Messages, Part, Run

BUNDLES = (
    "SD3Bundle",
    "FluxBundle",
    "Flux2KleinBundle",
    "QwenImageBundle",
    "QwenImageEditBundle",
    "WanBundle",
    "WanImageBundle",
    "ZImageBundle",
    "HunyuanVideo15Bundle",
    "LTX2Bundle",
    "BagelBundle",
    "HunyuanImage3Bundle",
)
KERNELS = ("FlowSDEStrategy", "CPSSDEStrategy", "DanceSDEStrategy", "DDIMStrategy")
LTX23_IS_NOT_COMPARED = "its LTX-2 has not been compared with LTX-2.3, and is given LTX-2 alone."
SCHEDULING = {"step_execution": False, "max_num_seqs": 1, "request_batch_max_wait_ms": 0}
"""Options by which vLLM-Omni joins requests into batches, and the values with which it joins none."""


def requests_are_batches(own: Part, run: Run) -> Messages:
    """vLLM-Omni is not asked to join requests, each of which is a whole batch."""
    engine_args = own.get("engine_args")
    asked: Mapping[str, object] = engine_args if isinstance(engine_args, Mapping) else {}
    given = [name for name, unset in SCHEDULING.items() if asked.get(name, unset) not in (None, unset)]
    if given:
        yield (
            f"{own.at}.engine_args sets {given}, which join requests between steps or before them. Here a request is a "
            f"batch of {own.at}.forward_batch_size samples, all of as many steps: none ends early, and no other could "
            f"take its place. Remove them, and set {own.at}.forward_batch_size."
        )


RULES = (
    family_is_served(
        BUNDLES,
        without=("WanAnimateBundle",),
        reasons={"LTX23Bundle": LTX23_IS_NOT_COMPARED},
    ),
    kernel_is_served(KERNELS),
    sampling_is_served,
    experts_switch_as_released,
    requests_are_batches,
)
