"""Qwen-Image as a family of the table."""

from typing import Any

import diffusers
from torch import Tensor

from unirl.models.patches import packed_2x2, unpacked_2x2
from unirl.models.qwen_image.bundle import QwenImageBundle, QwenImageInpaintBundle
from unirl.models.qwen_image.pipeline import QwenImageInpaintPipeline, QwenImagePipeline
from unirl.models.tiny.images import dynamic_scheduler
from unirl.types.media import ImageLists

from ..tiny_text import qwen_vl, text_tokenizer
from .kit import Family, Published, Request, seeded, stock_call
from .tiny_parts import certain, picture_and_mask_each, to_pil


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
    length, latents = request.params.max_sequence_length, packed_2x2(request.noise)
    return stock_call(request, guidance="true_cfg_scale", max_sequence_length=length, latents=latents)


def tiny_inpaint() -> Any:
    parts = {**tiny().components}
    # The stock pipeline draws from the posterior of the image, ours takes its mode: here they are the same.
    parts["vae"] = certain(parts["vae"])
    pipeline_class: Any = diffusers.QwenImageInpaintPipeline
    return pipeline_class(**parts)


def call_inpaint(request: Request) -> dict[str, Any]:
    images, masks = request.inputs["image"], request.inputs["mask"]
    assert isinstance(images, ImageLists) and isinstance(masks, ImageLists)
    return {
        **call(request),
        "latents": None,
        "image": [to_pil(image) for (image,) in images.images],
        "mask_image": [to_pil(mask) for (mask,) in masks.images],
        "strength": 1.0,
    }


def arrange_inpaint(stock: Any, request: Request) -> None:
    """Our noise instead of what the stock pipeline draws: called with latents it fails, as it then returns them
    alone where it needs the latents of the image too."""

    def prepare_latents(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        noise = packed_2x2(request.noise)
        return noise, noise, type(stock).prepare_latents(stock, *inputs)[2]

    stock.prepare_latents = prepare_latents


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
        published=(Published("Qwen/Qwen-Image", 20.4),),
    ),
    Family(
        name="qwen_image_inpaint",
        bundle=QwenImageInpaintBundle,
        pipeline=QwenImageInpaintPipeline,
        tiny=seeded(tiny_inpaint),
        params=PARAMS,
        call=call_inpaint,
        arrange=arrange_inpaint,
        from_stock=from_stock,
        inputs=picture_and_mask_each,
        published=(Published("Qwen/Qwen-Image", 20.4),),
    ),
]
