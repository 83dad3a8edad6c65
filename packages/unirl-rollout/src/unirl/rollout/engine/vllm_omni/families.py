"""Model families that the vLLM-Omni engine serves, and how encoded prompts cross to it.

Legend: B samples, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.nn.functional import pad

from unirl.rollout.engine.served_latents.folder import served_class
from unirl.types.conditions import Condition, TextEmbedCondition, TextTokenCondition
from unirl.types.errors import ContractError
from unirl.types.media import Modality
from unirl.types.sampling import DiffusionSamplingParams

NEGATIVE = "negative_"
"""What the slots of conditions of the negative prompt begin with."""
INTERVAL = "guidance_interval"
"""Of `sampler_kwargs`: the two noise levels between which steps are guided."""
FULL_TEXT = 512
"""Tokens of a text where `max_sequence_length` is not set, for a family that attends to all of them."""


@dataclass(frozen=True)
class Family:
    """What the trainer's side must know of a family."""

    modality: Modality = Modality.IMAGE
    attends_to_padding: bool = False
    """Whether texts are filled with zeros that the model attends to."""
    worker: str = "pipeline.GivenLatentsPipeline"
    """What samples inside vLLM-Omni's workers, below this package."""
    topology: str | None = None
    """Of a unified model, vLLM-Omni's name for its decoder alone, in one stage."""
    has_experts: bool = False
    """Whether devices share the experts of a layer out, each whole."""
    pushed: Mapping[str, str] | None = None
    """Of a unified model, which has one folder: how names of the weights of a push begin in it -> in the push."""
    takes_adapters: bool = True
    """Whether LoRA adapters can be pushed as they are; merged they always can."""
    settings: frozenset[str] = frozenset()
    """Of `sampler_kwargs`, those that the worker knows."""


SERVED: Mapping[str, Family] = {
    "StableDiffusion3Pipeline": Family(),
    "QwenImagePipeline": Family(),
    "Flux2KleinPipeline": Family(),
    "WanPipeline": Family(Modality.VIDEO, attends_to_padding=True),
    # vLLM-Omni has layers for adapters in the blocks alone, not in the refiner of the text, which LoRA trains too.
    "HunyuanVideo15Pipeline": Family(Modality.VIDEO, takes_adapters=False),
    "bagel": Family(
        worker="bagel.GivenBagelPipeline",
        topology="bagel_single_stage",
        pushed={"language_model.": ""},
        takes_adapters=False,
        settings=frozenset({INTERVAL, "guidance_scale_image", "guidance_renorm", "guidance_renorm_min"}),
    ),
    "hunyuan_image_3_moe": Family(
        worker="hunyuan_image3.GivenHunyuanImage3Pipeline",
        topology="hunyuan_image3_dit",
        has_experts=True,
        pushed={"model.": "model.", "lm_head.": "lm_head."},
        takes_adapters=False,
        settings=frozenset({INTERVAL}),
    ),
}
"""By the pipeline class that a checkpoint's index names, or the type of a model without an index."""


def family_of(folder: Path) -> Family:
    """The family of a pipeline folder. Raises ConfigError for one that is not served."""
    return SERVED[served_class(folder, SERVED, "vLLM-Omni")]


def text_tensors(
    conditions: Mapping[str, Condition], family: Family, params: DiffusionSamplingParams
) -> dict[str, Tensor]:
    """`SLOT.embeds` [B, L, D], `SLOT.mask` [B, L] and `SLOT.pooled` [B, P] of every text, as far as it has them; of a
    text that the model embeds itself `SLOT.ids` and `SLOT.mask` [B, L].

    Raises ContractError for a condition that is no text.
    """
    tensors: dict[str, Tensor] = {}
    for slot, condition in conditions.items():
        if isinstance(condition, TextTokenCondition):
            tensors |= {f"{slot}.ids": condition.input_ids, f"{slot}.mask": condition.attention_mask}
            continue
        if not isinstance(condition, TextEmbedCondition):
            raise ContractError(
                f"vLLM-Omni is given text alone; the conditions hold {slot!r} ({type(condition).__name__}). "
                "Use the trainside or replica engine for models that read images."
            )
        embeds = condition.embeds
        if family.attends_to_padding:
            missing = (params.max_sequence_length or FULL_TEXT) - embeds.shape[1]
            embeds = pad(embeds, (0, 0, 0, missing))
        tensors[f"{slot}.embeds"] = embeds
        if condition.attention_mask is not None and not family.attends_to_padding:
            tensors[f"{slot}.mask"] = condition.attention_mask
        if condition.pooled is not None:
            tensors[f"{slot}.pooled"] = condition.pooled
    return tensors
