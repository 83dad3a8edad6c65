"""Qwen-Image as a family of the table."""

from typing import Any

import diffusers
from torch import Tensor

from unirl.models.patches import packed_2x2, unpacked_2x2
from unirl.models.qwen_image.bundle import QwenImageBundle
from unirl.models.qwen_image.pipeline import QwenImagePipeline

from ..tiny_text import qwen_vl, text_tokenizer
from .kit import Family, Published, Request, seeded
from .tiny_parts import dynamic_scheduler


def tiny_vae() -> Any:
    """A factor of 8 as in the real one; four channels of different mean and deviation."""
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.5, 2.0, 1.0],
    )


def tiny_transformer(**changes: Any) -> Any:
    """Two layers of two heads."""
    fields: dict[str, Any] = {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "axes_dims_rope": (8, 4, 4),
    }
    return diffusers.QwenImageTransformer2DModel(**fields | changes)


def tiny(**changes: Any) -> Any:
    pipeline_class: Any = diffusers.QwenImagePipeline
    return pipeline_class(
        scheduler=dynamic_scheduler(max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02),
        vae=tiny_vae(),
        text_encoder=qwen_vl("qwen2_5_vl"),
        tokenizer=text_tokenizer(),
        transformer=tiny_transformer(**changes),
    )


def call(request: Request) -> dict[str, Any]:
    params = request.params
    return {
        "prompt": request.texts,
        "negative_prompt": request.negative,
        "true_cfg_scale": params.guidance_scale,
        "height": params.height,
        "width": params.width,
        "max_sequence_length": params.max_sequence_length,
        "latents": packed_2x2(request.noise),
    }


def from_stock(latents: Tensor, request: Request) -> Tensor:
    return unpacked_2x2(latents, *request.noise.shape[-2:])


PARAMS = {"max_sequence_length": 512}

FAMILIES = [
    Family(
        name="qwen_image",
        bundle=QwenImageBundle,
        pipeline=QwenImagePipeline,
        tiny=seeded(tiny),
        params=PARAMS,
        call=call,
        from_stock=from_stock,
        # The class's defaults are the released sizes.
        published=(Published("Qwen/Qwen-Image", 20.4, {"transformer": {}}),),
    ),
]
