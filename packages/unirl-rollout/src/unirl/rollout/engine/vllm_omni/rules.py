"""What vLLM-Omni needs of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.engine.served_latents.rules import family_is_served, kernel_is_served, sampling_is_served

RULES = (
    family_is_served(("SD3Bundle", "Flux2KleinBundle", "QwenImageBundle", "WanBundle", "HunyuanVideo15Bundle")),
    kernel_is_served(("FlowSDEStrategy", "CPSSDEStrategy", "DanceSDEStrategy", "DDIMStrategy")),
    sampling_is_served,
)
