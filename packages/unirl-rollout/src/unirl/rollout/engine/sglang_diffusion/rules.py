"""What SGLang Diffusion needs of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.engine.child.rules import gpus_are_here, gpus_suffice
from unirl.rollout.engine.served_latents.rules import family_is_served, kernel_is_served, sampling_is_served

RULES = (
    family_is_served(("SD3Bundle", "FluxBundle", "Flux2KleinBundle", "QwenImageBundle", "WanBundle", "ZImageBundle")),
    kernel_is_served(("FlowSDEStrategy", "CPSSDEStrategy")),
    sampling_is_served,
    gpus_suffice("num_gpus"),
)
MACHINE_RULES = (gpus_are_here("num_gpus"),)
