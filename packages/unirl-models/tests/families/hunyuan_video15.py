"""HunyuanVideo 1.5 as a family of the table."""

from typing import Any

import diffusers
import torch

from unirl.models.diffusers_pipeline.references import as_pil
from unirl.models.hunyuan_video15.bundle import HunyuanVideo15Bundle, HunyuanVideo15ImageBundle
from unirl.models.hunyuan_video15.pipeline import HunyuanVideo15ImagePipeline, HunyuanVideo15Pipeline
from unirl.models.tiny.hunyuan_video15 import image_to_video, pipeline
from unirl.types.media import Images, Primitive

from .kit import Family, Published, Request, seeded, stock_call
from .tiny_parts import load_lora_by_model


def first_frames(num_samples: int) -> dict[str, Primitive]:
    """Frames of 8 bits. The stock pipeline finds 16 x 16 to be the size nearest in shape."""
    generator = torch.Generator().manual_seed(0)
    return {"image": Images(pixels=torch.randint(0, 256, (num_samples, 3, 24, 28), generator=generator) / 255)}


def arrange(stock: Any, request: Request) -> None:
    """The guider's scale, and lengths that keep the reference quick: it pads everything to them."""
    stock.guider = diffusers.ClassifierFreeGuidance(guidance_scale=request.params.guidance_scale)
    stock.tokenizer_max_length = request.params.max_sequence_length
    stock.tokenizer_2_max_length = 32
    stock.vision_num_semantic_tokens = 9
    stock.vae.enable_slicing()  # the attention of this VAE takes one video at a time


def call(request: Request) -> dict[str, Any]:
    return stock_call(request, guidance=None, num_frames=request.params.num_frames)


def call_i2v(request: Request) -> dict[str, Any]:
    """The size follows from the image."""
    image = request.inputs["image"]
    assert isinstance(image, Images)
    without_size = {name: value for name, value in call(request).items() if name not in ("height", "width")}
    return {**without_size, "image": as_pil(image.pixels[0])}


PARAMS: dict[str, Any] = {"num_frames": 5, "max_sequence_length": 64, "height": 16, "width": 16}

FAMILIES = [
    Family(
        name="hunyuan_video15_t2v",
        bundle=HunyuanVideo15Bundle,
        pipeline=HunyuanVideo15Pipeline,
        tiny=seeded(pipeline),
        params=PARAMS,
        other_size={"height": 8, "width": 24, "num_frames": 9},
        call=call,
        arrange=arrange,
        load_lora=load_lora_by_model,
        # The class's defaults are the released sizes.
        published=(Published("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", 8.3),),
    ),
    Family(
        name="hunyuan_video15_i2v",
        bundle=HunyuanVideo15ImageBundle,
        pipeline=HunyuanVideo15ImagePipeline,
        tiny=seeded(image_to_video),
        params=PARAMS,
        other_size={"num_frames": 9},
        inputs=first_frames,
        is_latent_batch=False,
        call=call_i2v,
        arrange=arrange,
        load_lora=load_lora_by_model,
        published=(Published("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v", 8.3),),
    ),
]
