"""Recipe rules of SGLang Diffusion. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.rollout.engine.served_latents.rules import (
    experts_switch_as_released,
    family_is_served,
    kernel_is_served,
    sampling_is_served,
)
from unirl.types.recipe import Messages, Part, Run

WITHOUT_TOKEN_SPLITS = (
    "SGLang's SD3 samples another image where its tokens are split. Take it out: engine.num_devices splits SD3 by "
    "tensors, and {enable_cfg_parallel: true} by the branches of guidance."
)

EDITS_ALONE = (
    "SGLang 0.5.23 edits one image per forward (`assert batch_size == 1` in its QwenImageEditPipelineConfig) and takes "
    "every image that it is given to have 1024 x 1024 pixels."
)


def token_splits(engine_args: Mapping[str, object]) -> list[str]:
    """The SGLang options among these that split the tokens of a latent over devices."""
    names = ("sp_degree", "ulysses_degree", "ring_degree", "kv_gather_degree")
    return [name for name in names if engine_args.get(name) not in (None, 1)]


def tokens_are_together(own: Part, run: Run) -> Messages:
    """The tokens of a latent are split only if SGLang's model supports it."""
    bundle, engine_args = run.policy.bundle, own.get("engine_args")
    is_sd3 = "SD3Bundle" in bundle.class_names
    if is_sd3 and isinstance(engine_args, Mapping) and (refused := token_splits(engine_args)):
        yield f"{own.at}.engine_args sets {refused}. {WITHOUT_TOKEN_SPLITS}"


RULES = (
    family_is_served(
        ("SD3Bundle", "FluxBundle", "Flux2KleinBundle", "QwenImageBundle", "WanBundle", "ZImageBundle"),
        reasons={"QwenImageEditBundle": EDITS_ALONE},
    ),
    kernel_is_served(("FlowSDEStrategy", "CPSSDEStrategy")),
    sampling_is_served,
    experts_switch_as_released,
    tokens_are_together,
)
