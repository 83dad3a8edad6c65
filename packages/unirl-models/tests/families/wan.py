"""Wan 2.1 and 2.2 as families of the table.

Sampling agrees because both sides walk pinned float levels; the stock scheduler cuts its timesteps to integers.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor

from unirl.models.diffusers_pipeline.normalisation import standardised
from unirl.models.diffusers_pipeline.references import as_pil
from unirl.models.tiny.wan import (
    CLIP_TOKENS,
    clip,
    image_to_video_clip,
    image_to_video_experts,
    image_to_video_first_frame,
    shared_parts,
    tiny_transformer,
    tiny_vae,
    tiny_vae_16,
    two_experts,
)
from unirl.models.wan.bundle import WanAnimateBundle, WanBundle, WanImageBundle, WanVACEBundle
from unirl.models.wan.pipeline import WanAnimatePipeline, WanImagePipeline, WanPipeline, WanVACEPipeline
from unirl.types.media import ImageLists, Images, Primitive, Videos

from .kit import Family, Published, Request, seeded, stock_call

# Counted by the attention of Wan 2.1 I2V.
CLIP_TEXT = {"max_sequence_length": 512}
PARAMS = {"num_frames": 5, "max_sequence_length": 32}
OTHER_SIZE = {"height": 32, "width": 48, "num_frames": 9}


def tiny_t2v(**changes: Any) -> Any:
    pipeline_class: Any = diffusers.WanPipeline
    return pipeline_class(transformer=tiny_transformer(), **{**shared_parts(), **changes})


def tiny_ti2v() -> Any:
    return tiny_t2v(vae=tiny_vae_16(), expand_timesteps=True)


def call(request: Request) -> dict[str, Any]:
    params = request.params
    return stock_call(
        request,
        num_frames=params.num_frames,
        guidance_scale_2=params.guidance_scale_2,
        max_sequence_length=params.max_sequence_length,
    )


def pictures(num_samples: int, seed: int = 0) -> Images:
    """Images of 8 bits and another size than the videos."""
    generator = torch.Generator().manual_seed(seed)
    return Images(pixels=torch.randint(0, 256, (num_samples, 3, 40, 56), generator=generator) / 255)


def first_frames(num_samples: int) -> dict[str, Primitive]:
    return {"image": pictures(num_samples)}


def first_and_last_frames(num_samples: int) -> dict[str, Primitive]:
    pairs = zip(pictures(num_samples).pixels, pictures(num_samples, seed=1).pixels, strict=True)
    return {"image": ImageLists(images=[list(pair) for pair in pairs])}


def call_with_images(request: Request) -> dict[str, Any]:
    given = request.inputs["image"]
    samples = given.images if isinstance(given, ImageLists) else [[each] for each in getattr(given, "pixels", ())]
    last = {"last_image": as_pil(samples[0][1])} if len(samples[0]) > 1 else {}
    return call(request) | {"image": as_pil(samples[0][0]), **last}


def tiny_vace() -> Any:
    transformer = diffusers.WanVACETransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=64,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        vace_layers=[0],
        vace_in_channels=2 * 4 + 64,
    )
    pipeline_class: Any = diffusers.WanVACEPipeline
    return pipeline_class(transformer=transformer, transformer_2=None, **shared_parts())


def as_pictures(frames: Tensor) -> list[Any]:
    return [as_pil(frame) for frame in frames]


def call_vace(request: Request) -> dict[str, Any]:
    """One sample, which is all that the stock pipeline takes."""
    first = {"prompt": request.texts[0], "negative_prompt": request.negative[0], "latents": request.noise[:1].clone()}
    call_one = call(request) | first
    for slot, name in (("video", "video"), ("mask", "mask")):
        media = request.inputs.get(slot)
        if isinstance(media, Videos):
            call_one[name] = as_pictures(media.unpack("frames")[0])
    references = request.inputs.get("image")
    if isinstance(references, ImageLists):
        call_one["reference_images"] = [[as_pil(each) for each in references.images[0]]]
    return call_one


def tiny_animate() -> Any:
    """With a face video of 16 pixels on a side, and motion in both layers."""
    transformer = diffusers.WanAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=12,
        latent_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=64,
        ffn_dim=32,
        num_layers=2,
        image_dim=8,
        added_kv_proj_dim=24,
        rope_max_seq_len=32,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=1,
    )
    pipeline_class: Any = diffusers.WanAnimatePipeline
    return pipeline_class(transformer=transformer, **shared_parts(), **clip(transformers.CLIPVisionModel))


def clips(num_samples: int, height: int, width: int, seed: int) -> Videos:
    """Videos of 8 bits."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randint(0, 256, (num_samples, PARAMS["num_frames"], 3, height, width), generator=generator) / 255
    return Videos.pack(frames=list(frames))


def animated(num_samples: int) -> dict[str, Primitive]:
    """Videos of other sizes than those that are read."""
    motion = {"pose": clips(num_samples, 40, 56, 2), "face": clips(num_samples, 24, 20, 3)}
    return {"image": pictures(num_samples), **motion}


def replaced(num_samples: int) -> dict[str, Primitive]:
    """Into a scene, under a mask of many greys."""
    scene = {"background": clips(num_samples, 24, 40, 4), "mask": clips(num_samples, 48, 24, 5)}
    return animated(num_samples) | scene


def call_animate(request: Request) -> dict[str, Any]:
    """One sample, which is all that the stock pipeline takes."""
    shared = call(request)
    del shared["num_frames"], shared["guidance_scale_2"]
    videos = {slot: media for slot, media in request.inputs.items() if isinstance(media, Videos)}
    image = request.inputs["image"]
    assert isinstance(image, Images)
    return {
        **shared,
        "image": as_pil(image.pixels[0]),
        "segment_frame_length": request.params.num_frames,
        "mode": "replace" if "background" in videos else "animate",
        **{f"{slot}_video": as_pictures(media.unpack("frames")[0]) for slot, media in videos.items()},
    }


def from_animate(latents: Tensor, request: Request) -> Tensor:
    """The stock pipeline returns what its VAE reads."""
    del request
    return standardised(latents, tiny_vae().config)


def load_two_loras(stock: Any, folder: Path) -> None:
    stock.load_lora_weights(str(folder))
    stock.load_lora_weights(str(folder / "transformer_2"), load_into_transformer_2=True)


ANIMATE = Family(
    name="wan22_animate",
    bundle=WanAnimateBundle,
    pipeline=WanAnimatePipeline,
    tiny=seeded(tiny_animate),
    params=PARAMS | CLIP_TEXT,
    call=call_animate,
    from_stock=from_animate,
    inputs=animated,
    is_latent_batch=False,
    encodes_media=False,
    published=(Published("Wan-AI/Wan2.2-Animate-14B-Diffusers", 17.3),),
)

FAMILIES = [
    Family(
        name="wan21_t2v",
        bundle=WanBundle,
        pipeline=WanPipeline,
        tiny=seeded(tiny_t2v),
        params=PARAMS,
        other_size=OTHER_SIZE,
        call=call,
        published=(
            # Called 1.3B.
            Published("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 1.42),
            # The class's defaults are the released sizes.
            Published("Wan-AI/Wan2.1-T2V-14B-Diffusers", 14.3),
        ),
    ),
    Family(
        name="wan22_t2v",
        bundle=WanBundle,
        pipeline=WanPipeline,
        tiny=seeded(two_experts),
        params=PARAMS | {"guidance_scale_2": 2.0},
        other_size=OTHER_SIZE,
        unguided={"guidance_scale": 1.0, "guidance_scale_2": None},
        call=call,
        load_lora=load_two_loras,
        # Called A14B: 14 active of 28.
        published=(Published("Wan-AI/Wan2.2-T2V-A14B-Diffusers", 28.6, components=("transformer", "transformer_2")),),
    ),
    Family(
        name="wan22_ti2v",
        tile=None,
        bundle=WanBundle,
        pipeline=WanPipeline,
        tiny=seeded(tiny_ti2v),
        params=PARAMS,
        other_size={"height": 64, "width": 32, "num_frames": 9},
        call=call,
        published=(Published("Wan-AI/Wan2.2-TI2V-5B-Diffusers", 5.0),),
    ),
    Family(
        name="wan21_i2v",
        bundle=WanImageBundle,
        pipeline=WanImagePipeline,
        tiny=seeded(image_to_video_clip),
        params=PARAMS | CLIP_TEXT,
        other_size=OTHER_SIZE,
        call=call_with_images,
        inputs=first_frames,
        is_latent_batch=False,
        published=(Published("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", 16.4),),
    ),
    Family(
        name="wan21_first_last_frame",
        bundle=WanImageBundle,
        pipeline=WanImagePipeline,
        tiny=seeded(lambda: image_to_video_clip(pos_embed_seq_len=2 * CLIP_TOKENS)),
        params=PARAMS | CLIP_TEXT,
        other_size=OTHER_SIZE,
        call=call_with_images,
        inputs=first_and_last_frames,
        is_latent_batch=False,
        published=(Published("Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers", 16.4),),
    ),
    Family(
        name="wan22_i2v",
        bundle=WanImageBundle,
        pipeline=WanImagePipeline,
        tiny=seeded(image_to_video_experts),
        params=PARAMS | {"guidance_scale_2": 2.0},
        other_size=OTHER_SIZE,
        unguided={"guidance_scale": 1.0, "guidance_scale_2": None},
        call=call_with_images,
        inputs=first_and_last_frames,
        is_latent_batch=False,
        load_lora=load_two_loras,
        published=(Published("Wan-AI/Wan2.2-I2V-A14B-Diffusers", 28.6, components=("transformer", "transformer_2")),),
    ),
    Family(
        name="wan22_ti2v_image",
        tile=None,
        bundle=WanImageBundle,
        pipeline=WanImagePipeline,
        tiny=seeded(image_to_video_first_frame),
        params=PARAMS,
        other_size={"height": 64, "width": 32, "num_frames": 9},
        call=call_with_images,
        inputs=first_frames,
        is_latent_batch=False,
    ),
    Family(
        name="wan21_vace",
        bundle=WanVACEBundle,
        pipeline=WanVACEPipeline,
        tiny=seeded(tiny_vace),
        params=PARAMS,
        other_size=OTHER_SIZE,
        call=call_vace,
        is_latent_batch=False,
        published=(
            Published("Wan-AI/Wan2.1-VACE-1.3B-diffusers", 2.15),
            Published("Wan-AI/Wan2.1-VACE-14B-diffusers", 17.3),
        ),
    ),
    ANIMATE,
    replace(ANIMATE, name="wan22_animate_replace", inputs=replaced, published=()),
]
