"""HunyuanVideo as families of the table: of text, and from images by both released kinds of transformers."""

import dataclasses
from functools import partial
from typing import Any

import diffusers
import torch
import transformers

from unirl.models.diffusers_pipeline.references import as_pil
from unirl.models.hunyuan_video import image_text
from unirl.models.hunyuan_video.bundle import HunyuanVideoBundle, HunyuanVideoImageBundle
from unirl.models.hunyuan_video.pipeline import HunyuanVideoImagePipeline, HunyuanVideoPipeline
from unirl.models.tiny.hunyuan_video import llama_config, pipeline, shared_parts
from unirl.models.tiny.text import template_tokenizer
from unirl.types.media import Images, Primitive

from .kit import Family, Published, Request, seeded, stock_call

IMAGE_MARK = "<image>"
# The image is the sixth token, where the stock pipeline looks for it, and every header ends in one token.
MARKS = (
    "<|start_header_id|>",
    "sys",
    "tem",
    "<|end_header_id|>",
    "\n\n",
    IMAGE_MARK,
    "<|eot_id|>",
    "user",
    "assistant",
)
TOKENS_TO_IMAGE = 6


def llava_tokenizer() -> Any:
    after_image = image_text.TEMPLATE.partition("{}")[0].partition(IMAGE_MARK)[2]
    return template_tokenizer(after_image, image_text.TEMPLATE_TOKENS - TOKENS_TO_IMAGE, MARKS)


def tiny_i2v(**changes: Any) -> Any:
    tokenizer = llava_tokenizer()
    side, patch = 48, 2
    assert (side // patch) ** 2 == image_text.IMAGE_TOKENS
    vision = transformers.CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=side,
        patch_size=patch,
        projection_dim=8,
    )
    tokens: dict[str, Any] = {
        "image_token_index": tokenizer.convert_tokens_to_ids(IMAGE_MARK),
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = transformers.LlavaConfig(vision_config=vision, text_config=llama_config(), **tokens)
    pipeline_class: Any = diffusers.HunyuanVideoImageToVideoPipeline
    return pipeline_class(
        text_encoder=transformers.LlavaForConditionalGeneration(config),
        tokenizer=tokenizer,
        image_processor=transformers.CLIPImageProcessor(size={"shortest_edge": side}, crop_size=side),
        **shared_parts(**changes),
    )


def first_frames(num_samples: int) -> dict[str, Primitive]:
    """Frames of 8 bits and another size than the videos."""
    generator = torch.Generator().manual_seed(0)
    return {"image": Images(pixels=torch.randint(0, 256, (num_samples, 3, 40, 56), generator=generator) / 255)}


def call(request: Request) -> dict[str, Any]:
    params = request.params
    return stock_call(
        request,
        guidance="true_cfg_scale",
        guidance_scale=params.distilled_guidance_scale,
        num_frames=params.num_frames,
    )


def call_i2v(request: Request) -> dict[str, Any]:
    """One sample, because the stock pipeline has one black image next to all negative prompts."""
    images = request.inputs["image"]
    assert isinstance(images, Images)
    fields = call(dataclasses.replace(request, texts=request.texts[:1], noise=request.noise[:1]))
    if request.params.distilled_guidance_scale is None:
        del fields["guidance_scale"]
    return fields | {"image": as_pil(images.pixels[0])}


PARAMS: dict[str, Any] = {"distilled_guidance_scale": 6.0, "num_frames": 5}
OTHER_SIZE = {"height": 16, "width": 48, "num_frames": 9}
CONCATENATED: dict[str, Any] = {"image_condition_type": "latent_concat", "guidance_embeds": False}
REPLACED: dict[str, Any] = {"image_condition_type": "token_replace"}

FAMILIES = [
    Family(
        name="hunyuan_video",
        bundle=HunyuanVideoBundle,
        pipeline=HunyuanVideoPipeline,
        tiny=seeded(pipeline),
        params=PARAMS,
        other_size=OTHER_SIZE,
        call=call,
        # The class's defaults are the released sizes.
        published=(Published("hunyuanvideo-community/HunyuanVideo", 12.8),),
    ),
    Family(
        name="hunyuan_video_i2v",
        bundle=HunyuanVideoImageBundle,
        pipeline=HunyuanVideoImagePipeline,
        tiny=seeded(partial(tiny_i2v, **REPLACED)),
        params=PARAMS,
        other_size=OTHER_SIZE,
        inputs=first_frames,
        is_latent_batch=False,
        call=call_i2v,
        published=(Published("hunyuanvideo-community/HunyuanVideo-I2V", 12.8),),
    ),
    Family(
        name="hunyuan_video_i2v_concatenated",
        bundle=HunyuanVideoImageBundle,
        pipeline=HunyuanVideoImagePipeline,
        tiny=seeded(partial(tiny_i2v, in_channels=2 * 4 + 1, **CONCATENATED)),
        params={"num_frames": 9},
        other_size={"height": 16, "width": 48, "num_frames": 13},
        inputs=first_frames,
        is_latent_batch=False,
        call=call_i2v,
        cut_frames=4,
        encodes_media=False,
        published=(Published("hunyuanvideo-community/HunyuanVideo-I2V-33ch", 12.8),),
    ),
]
