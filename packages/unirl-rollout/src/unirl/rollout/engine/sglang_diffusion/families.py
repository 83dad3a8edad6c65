"""Model families that SGLang Diffusion runs natively, with the names and layouts of their tensors.

Legend: B samples, K stored positions, L tokens, D width, p pixels on a side of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from unirl.rollout.engine.served_latents.folder import served_class, transformers
from unirl.rollout.engine.served_latents.tokens import from_tokens
from unirl.rollout.engine.sglang_diffusion.rules import HUNYUAN_VIDEO_IS_WHOLE, SD3_IS_WHOLE, token_splits
from unirl.types.adapters import FACTOR_A, FACTOR_B, factor_pairs
from unirl.types.conditions import Condition, ImageEmbedCondition, ImageLatentCondition, TextEmbedCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Modality
from unirl.types.sampling import DiffusionSamplingParams

Conditions = Mapping[str, Condition]


@dataclass(frozen=True)
class Family:
    """What the trainer's side needs to know about a family."""

    model_id: str
    """SGLang's name for the architecture of a local folder."""
    text: Callable[[TextEmbedCondition, str, DiffusionSamplingParams], dict[str, Tensor]]
    """(condition, prefix, sampling) -> fields of SGLang's request; prefix is "" or "negative_". A field is a list of
    tensors, one per text encoder; "NAME.1" is the second."""
    modality: Modality = Modality.IMAGE
    token_side: int = 0
    """p if latents are [B, L, C p p] between steps, 0 if they stay [B, C, ...]."""
    frames_axis: int | None = None
    """Axis of the single frame in SGLang's initial latents of an image; None if they have no such axis."""
    settings: frozenset[str] = frozenset()
    """Sampling settings that other families have not: `distilled_guidance_scale` if checkpoints may take the guidance
    scale as an input (guidance distillation)."""
    unguided_scale: float = 1.0
    """SGLang's guidance scale for samples without guidance."""
    model_id_of_two: str | None = None
    """SGLang's name for a folder of two experts."""
    loaded_as: str | None = None
    """Pipeline class that SGLang is told to load instead, whose requests bring no images for its own processing."""
    reads: Mapping[type[Condition], str] = field(default_factory=dict)
    """Conditions besides texts that the model reads, as the trainer's pipeline has encoded them -> the field of
    SGLang's request."""
    is_whole: str | None = None
    """Why SGLang must not split the tokens of a latent over devices, and what to do; None if it can."""
    joined: tuple[tuple[str, ...], ...] = ()
    """Layers of a block that SGLang joins into one, by the ends of their names, as far as a block has them. Its merge
    takes the factors of all or of none (`_merge_lora_into_data` in its runtime/layers/lora/linear.py)."""

    def initial(self, latents: Tensor) -> Tensor:
        """Our initial latents [B, ...] in SGLang's layout."""
        return latents if self.frames_axis is None else latents.unsqueeze(self.frames_axis)

    def stored(self, latents: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Stored latents [B, K, *shape] from SGLang's [B, K, ...]."""
        if not self.token_side:
            return latents.reshape(*latents.shape[:2], *shape)
        return from_tokens(latents, self.token_side, *shape[-2:])

    def guidance_scale(self, params: DiffusionSamplingParams) -> float:
        """Guidance scale in SGLang's convention."""
        return params.guidance_scale if params.uses_guidance else self.unguided_scale

    def split(self, num_devices: int, engine_args: Mapping[str, object]) -> dict[str, int]:
        """SGLang options that split the transformer over an instance's devices, overridden by those of the recipe;
        empty if SGLang's default is right. Raises ConfigError for a split that the model does not support."""
        if self.is_whole is None or num_devices == 1:
            return {}
        if refused := token_splits(engine_args):
            raise ConfigError(f"engine.engine_args sets {refused}. {self.is_whole}")
        degree = engine_args.get("cfg_parallel_degree") or (2 if engine_args.get("enable_cfg_parallel") else 1)
        return {"sp_degree": 1, "tp_size": num_devices // int(str(degree))}

    def completed(self, factors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The factors of an adapter, and zeros for layers without any that SGLang joins with some that have them.

        shapes: of the checkpoint's tensors.
        """
        whole = dict(factors)
        for layer, (a, b) in factor_pairs(factors).items():
            for group in self.joined:
                block = next((layer.removesuffix(end) for end in group if layer.endswith(end)), None)
                for name in [] if block is None else [block + end for end in group]:
                    if f"{name}.weight" in shapes and name + FACTOR_A not in whole:
                        whole[name + FACTOR_A] = torch.zeros_like(a)
                        whole[name + FACTOR_B] = b.new_zeros(shapes[f"{name}.weight"][0], b.shape[1])
        return whole

    def inputs(self, conditions: Conditions, params: DiffusionSamplingParams) -> dict[str, Tensor]:
        """Encoded prompts as fields of SGLang's request. Raises ContractError for unsupported conditions."""
        fields: dict[str, Tensor] = {}
        for slot, condition in conditions.items():
            name = self.reads.get(type(condition))
            if name is not None and isinstance(condition, ImageLatentCondition | ImageEmbedCondition):
                fields[name] = condition.latents if isinstance(condition, ImageLatentCondition) else condition.embeds
                continue
            prefix = {"text": "", "negative_text": "negative_"}.get(slot)
            if prefix is None or not isinstance(condition, TextEmbedCondition):
                raise ContractError(
                    f"SGLang Diffusion is given text alone; the conditions hold {slot!r} ({type(condition).__name__}). "
                    "Use the trainside or replica engine for models that read images."
                )
            fields |= self.text(condition, prefix, params)
        return fields


def _pooled_text(text: TextEmbedCondition, prefix: str, params: DiffusionSamplingParams) -> dict[str, Tensor]:
    if text.pooled is None:
        raise ContractError("the prompts were encoded without pooled vectors, which this family reads")
    short = "neg_" if prefix else ""
    return {f"{prefix}prompt_embeds": text.embeds, f"{short}pooled_embeds": text.pooled}


def _lengths(text: TextEmbedCondition) -> Tensor:
    """Tokens of each text, int64 [B]."""
    num, length = text.embeds.shape[:2]
    return torch.full((num,), length) if text.attention_mask is None else text.attention_mask.long().sum(dim=1)


def _ragged_text(text: TextEmbedCondition, prefix: str, params: DiffusionSamplingParams) -> dict[str, Tensor]:
    """Texts of different lengths, padded to the longest."""
    lengths = _lengths(text)
    return {f"{prefix}prompt_embeds": text.embeds[:, : int(lengths.max())], f"{prefix}prompt_seq_lens": lengths}


def _fixed_text(text: TextEmbedCondition, prefix: str, params: DiffusionSamplingParams) -> dict[str, Tensor]:
    num, length = text.embeds.shape[:2]
    return {f"{prefix}prompt_embeds": text.embeds, f"{prefix}prompt_seq_lens": torch.full((num,), length)}


def _pooled_and_fixed_text(text: TextEmbedCondition, prefix: str, params: DiffusionSamplingParams) -> dict[str, Tensor]:
    """Pooled vectors of the first encoder and tokens of the second."""
    fields = _pooled_text(text, prefix, params)
    tokens = fields[f"{prefix}prompt_embeds"]
    pooled = fields["neg_pooled_embeds" if prefix else "pooled_embeds"]
    num, length = tokens.shape[:2]
    return fields | {
        f"{prefix}prompt_embeds": pooled.clone(),  # a file holds no tensor twice
        f"{prefix}prompt_seq_lens": torch.ones(num, dtype=torch.int64),
        f"{prefix}prompt_embeds.1": tokens,
        f"{prefix}prompt_seq_lens.1": torch.full((num,), length),
    }


def _masked_text(text: TextEmbedCondition, prefix: str, params: DiffusionSamplingParams) -> dict[str, Tensor]:
    """Texts of different lengths, which the model must tell from their padding, and pooled vectors."""
    fields = _pooled_text(text, prefix, params)
    lengths = _lengths(text)
    length = int(lengths.max())
    mask = torch.arange(length) < lengths[:, None]
    return fields | {
        f"{prefix}prompt_embeds": text.embeds[:, :length],
        "negative_attention_mask" if prefix else "prompt_attention_mask": mask,
    }


def _padded_text(text: TextEmbedCondition, prefix: str, params: DiffusionSamplingParams) -> dict[str, Tensor]:
    """Texts padded with zeros to the full length; the model attends to the padding."""
    length = 512 if params.max_sequence_length is None else params.max_sequence_length
    return {f"{prefix}prompt_embeds": torch.nn.functional.pad(text.embeds, (0, 0, 0, length - text.embeds.shape[1]))}


SERVED: Mapping[str, Family] = {
    "StableDiffusion3Pipeline": Family("stable-diffusion-3.5-medium-diffusers", _pooled_text, is_whole=SD3_IS_WHOLE),
    "FluxPipeline": Family(
        "FLUX.1-dev", _pooled_and_fixed_text, token_side=2, settings=frozenset({"distilled_guidance_scale"})
    ),
    "Flux2KleinPipeline": Family("FLUX.2-klein-4B", _fixed_text, token_side=1),
    "QwenImagePipeline": Family("Qwen-Image", _ragged_text, token_side=2, frames_axis=1),
    "WanPipeline": Family(
        "Wan2.1-T2V-1.3B-Diffusers",
        _padded_text,
        modality=Modality.VIDEO,
        model_id_of_two="Wan2.2-T2V-A14B-Diffusers",
    ),
    "WanImageToVideoPipeline": Family(
        "Wan2.1-T2V-1.3B-Diffusers",
        _padded_text,
        modality=Modality.VIDEO,
        model_id_of_two="Wan2.2-T2V-A14B-Diffusers",
        loaded_as="WanPipeline",
        reads={ImageLatentCondition: "image_latent", ImageEmbedCondition: "image_embeds"},
    ),
    "HunyuanVideoPipeline": Family(
        "HunyuanVideo",
        _masked_text,
        modality=Modality.VIDEO,
        settings=frozenset({"distilled_guidance_scale"}),
        is_whole=HUNYUAN_VIDEO_IS_WHOLE,
        joined=(
            ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
            ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        ),
    ),
    "ZImagePipeline": Family("Z-Image", _ragged_text, frames_axis=2, unguided_scale=0.0),
}
"""Pipeline class in a checkpoint's index -> family."""


def family_of(folder: Path) -> Family:
    """The family of a pipeline folder. Raises ConfigError if it is not in `SERVED`."""
    family = SERVED[served_class(folder, SERVED, "SGLang Diffusion")]
    if family.model_id_of_two is None or len(transformers(folder)) == 1:
        return family
    return replace(family, model_id=family.model_id_of_two)
