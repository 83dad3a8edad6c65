"""Model families that the vLLM-Omni engine supports, and how encoded prompts are sent to it.

Legend: B samples, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from unirl.rollout.engine.served_latents.folder import served_class
from unirl.types.conditions import (
    Condition,
    ImageEmbedCondition,
    ImageLatentCondition,
    ImagePatchCondition,
    TextEmbedCondition,
    TextTokenCondition,
)
from unirl.types.errors import ContractError
from unirl.types.media import Modality
from unirl.types.sampling import DiffusionSamplingParams

NEGATIVE = "negative_"
"""Prefix of the condition slots of the negative prompt."""
PATCHES, FRAMES, FEATURES = ".patches", ".latents", ".features"
"""Ends of the names of images as tokens, as latents next to those of the sample, and as features."""
INTERVAL = "guidance_interval"
"""Key of `sampler_kwargs`: the two noise levels between which steps are guided."""
DISTILLED_GUIDANCE = "distilled_guidance_scale"
"""Sampling setting, and its key in a call's layout: guidance that the model takes as an input."""
FAMILY = "family"
"""Key of the arguments of a custom pipeline: the class in the index of the checkpoint, whatever it is loaded as."""
FULL_TEXT = 512
"""Text length if `max_sequence_length` is not set, for families that attend to padding."""


@dataclass(frozen=True)
class Family:
    """What the trainer's side needs to know about a family."""

    modality: Modality = Modality.IMAGE
    attends_to_padding: bool = False
    """True if texts are padded with zeros that the model attends to."""
    worker: str = "pipeline.GivenLatentsPipeline"
    """Custom pipeline inside vLLM-Omni's workers, relative to this package."""
    topology: str | None = None
    """vLLM-Omni's name for the decoder-only, one-stage deployment of a unified model; None for other models."""
    has_experts: bool = False
    """True if the experts of a layer are distributed over devices (expert parallelism)."""
    pushed: Mapping[str, str] | None = None
    """For unified models, which have one folder: prefix of weight names in the checkpoint -> in a push."""
    merges_adapters: bool = False
    """True if the workers merge a pushed LoRA adapter into the weights of the checkpoint, because vLLM-Omni's adapters
    do not reach all its layers."""
    loaded_as: str | None = None
    """Pipeline class that vLLM-Omni is told to load instead, whose requests bring no images for its own processing."""
    reads: tuple[type[Condition], ...] = ()
    """Conditions besides texts that the model reads, as the trainer's pipeline has encoded them."""
    settings: frozenset[str] = frozenset()
    """Keys of `sampler_kwargs` that the worker knows."""
    served: frozenset[str] = frozenset()
    """Sampling settings that other families have not."""


SERVED: Mapping[str, Family] = {
    "StableDiffusion3Pipeline": Family(),
    "QwenImagePipeline": Family(),
    "QwenImageEditPipeline": Family(loaded_as="QwenImagePipeline", reads=(ImagePatchCondition,)),
    "QwenImageEditPlusPipeline": Family(loaded_as="QwenImagePipeline", reads=(ImagePatchCondition,)),
    "FluxPipeline": Family(served=frozenset({DISTILLED_GUIDANCE})),
    "FluxKontextPipeline": Family(
        loaded_as="FluxPipeline",
        reads=(ImagePatchCondition,),
        settings=frozenset({"keeps_reference_size"}),
        served=frozenset({DISTILLED_GUIDANCE}),
    ),
    "FluxFillPipeline": Family(
        loaded_as="FluxPipeline", reads=(ImageLatentCondition,), served=frozenset({DISTILLED_GUIDANCE})
    ),
    "Flux2KleinPipeline": Family(reads=(ImagePatchCondition,)),
    "ZImagePipeline": Family(),
    # With an image the first frame of TI2V-5B, whose index names this class too.
    "WanPipeline": Family(Modality.VIDEO, attends_to_padding=True, reads=(ImageLatentCondition,)),
    "WanImageToVideoPipeline": Family(
        Modality.VIDEO,
        attends_to_padding=True,
        loaded_as="WanPipeline",
        reads=(ImageLatentCondition, ImageEmbedCondition),
    ),
    # vLLM-Omni's adapters reach only the blocks, not the text refiner, which LoRA trains too.
    "HunyuanVideo15Pipeline": Family(Modality.VIDEO, merges_adapters=True),
    "HunyuanVideo15ImageToVideoPipeline": Family(
        Modality.VIDEO,
        merges_adapters=True,
        loaded_as="HunyuanVideo15Pipeline",
        reads=(ImageLatentCondition, ImageEmbedCondition),
    ),
    "LTX2Pipeline": Family(Modality.VIDEO),
    "bagel": Family(
        worker="bagel.GivenBagelPipeline",
        topology="bagel_single_stage",
        pushed={"language_model.": ""},
        merges_adapters=True,
        settings=frozenset({INTERVAL, "guidance_scale_image", "guidance_renorm", "guidance_renorm_min"}),
    ),
    "hunyuan_image_3_moe": Family(
        worker="hunyuan_image3.GivenHunyuanImage3Pipeline",
        topology="hunyuan_image3_dit",
        has_experts=True,
        pushed={"model.": "model.", "lm_head.": "lm_head."},
        merges_adapters=True,
        settings=frozenset({INTERVAL}),
    ),
}
"""Pipeline class in a checkpoint's index, or model type without an index -> family."""


def family_of(folder: Path) -> Family:
    """The family of a pipeline folder. Raises ConfigError if it is not in `SERVED`."""
    return SERVED[served_class(folder, SERVED, "vLLM-Omni")]


def text_tensors(
    conditions: Mapping[str, Condition], family: Family, params: DiffusionSamplingParams
) -> dict[str, Tensor]:
    """`SLOT.embeds` [B, L, D], `SLOT.mask` [B, L] and `SLOT.pooled` [B, P] of every text, as far as it has them. For a
    text that the model embeds itself: `SLOT.ids` and `SLOT.mask` [B, L].

    Of images as tokens `SLOT.patches` [N, D] of all samples, `SLOT.grids` [I, 3] of all images, and `SLOT.images` [B],
    how many a sample has; as latents `SLOT.latents` [B, ...], as features `SLOT.features` [B, L, D]. Raises
    ContractError for a condition that the family does not read.
    """
    tensors: dict[str, Tensor] = {}
    for slot, condition in conditions.items():
        if isinstance(condition, TextTokenCondition):
            tensors |= {f"{slot}.ids": condition.input_ids, f"{slot}.mask": condition.attention_mask}
            continue
        if isinstance(condition, family.reads):
            tensors |= _image_tensors(slot, condition)
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


def _image_tensors(slot: str, condition: Condition) -> dict[str, Tensor]:
    if isinstance(condition, ImageLatentCondition):
        return {f"{slot}{FRAMES}": condition.latents}
    if isinstance(condition, ImageEmbedCondition):
        return {f"{slot}{FEATURES}": condition.embeds}
    if not isinstance(condition, ImagePatchCondition):
        raise TypeError(condition)
    grids = [grid for sample in condition.grids for grid in sample]
    return {
        f"{slot}{PATCHES}": condition.patches,
        f"{slot}.grids": torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        f"{slot}.images": torch.tensor([len(sample) for sample in condition.grids]),
    }
