"""How large the released checkpoints of diffusion models are, to estimate memory before any is fetched. No torch.

Parameters of what trains are those that the tests of the families count on the meta device; bytes of decoding are those
of `apps/trainer/bench/decode_memory.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Released:
    """Sizes of one checkpoint."""

    trained: float
    """Billions of parameters that can train, of all experts."""
    text: float
    """Billions, of all text encoders and what follows them."""
    vae: float
    """Billions, kept in float32."""
    width: int
    """Of a token inside the transformer."""
    blocks: int
    """Transformer blocks of one expert."""
    pixels_per_token: int
    """On a side."""
    text_tokens: int
    """Most tokens of a text in a forward."""
    text_width: int
    """Of an embedded token, as conditions keep it."""
    decode_kb: float
    """Most kilobytes that decoding one sample holds, per pixel of a frame; of a video whose VAE decodes at once, per
    pixel of every frame."""
    decodes_at_once: bool = False
    """Whether the VAE holds all frames of a video, or of a span of it, while it decodes."""
    decode_gradient_kb: float | None = None
    """The same with what a gradient to the latents needs; None where nobody has counted it."""
    kept_per_token: int = 22
    """Tensors of a token's width that the backward pass of a block keeps, the mean of its blocks."""
    held_per_token: int = 16
    """Tensors of a token's width that a block holds at once without gradient: 11 to 16 in the blocks that were counted,
    more where each token goes to several experts."""
    frame_factor: int = 0
    """Frames per latent frame after the first; 0 of a family of images."""
    beside: float = 0.0
    """Billions of frozen parameters beside (image encoders), in the dtype of what trains."""
    experts: int = 1
    """Transformers that rows are routed to."""


_KL: dict[str, Any] = {"vae": 0.084, "decode_kb": 3.1, "decode_gradient_kb": 23.7, "pixels_per_token": 16}
_SDXL: dict[str, Any] = {**_KL, "pixels_per_token": 32}
_QWEN_IMAGE: dict[str, Any] = {
    "trained": 20.4,
    "text": 8.29,
    "vae": 0.127,
    "width": 3072,
    "blocks": 60,
    "pixels_per_token": 16,
    "text_tokens": 512,
    "text_width": 3584,
    "decode_kb": 7.0,
    "decode_gradient_kb": 30.7,
}
_WAN: dict[str, Any] = {
    "text": 5.68,
    "vae": 0.127,
    "pixels_per_token": 16,
    "frame_factor": 4,
    "text_tokens": 512,
    "text_width": 4096,
    "decode_kb": 20.0,
    "kept_per_token": 34,
}
_WAN_14B: dict[str, Any] = {**_WAN, "width": 5120, "blocks": 40}
_WAN_TI2V: dict[str, Any] = {**_WAN, "vae": 0.705, "pixels_per_token": 32, "decode_kb": 22.0}
_HUNYUAN_VIDEO: dict[str, Any] = {
    "trained": 12.8,
    "vae": 0.246,
    "width": 3072,
    "blocks": 60,
    "pixels_per_token": 16,
    "frame_factor": 4,
    "text_width": 4096,
    "decode_kb": 25.0,
}
_HUNYUAN_VIDEO15 = Released(
    trained=8.3,
    text=8.51,
    vae=1.25,
    width=2048,
    blocks=54,
    pixels_per_token=16,
    frame_factor=4,
    text_tokens=1256,
    text_width=3584,
    decode_kb=3.2,
    decodes_at_once=True,
    beside=0.43,
)
_FLUX1: dict[str, Any] = {**_KL, "trained": 11.9, "text": 4.89, "width": 3072, "blocks": 57, "text_width": 4096}
_KLEIN: dict[str, Any] = {**_KL, "text_tokens": 512}

RELEASED: Mapping[str, Released] = {
    # 31 tensors in the 13 blocks with two attentions, 22 and 20 in the others.
    "stabilityai/stable-diffusion-3.5-medium": Released(
        trained=2.47, text=5.58, width=1536, blocks=24, text_tokens=333, text_width=4096, kept_per_token=27, **_KL
    ),
    # Its blocks hold attention at two sizes and convolutions; these numbers stand for both.
    "stabilityai/stable-diffusion-xl-base-1.0": Released(
        trained=2.57, text=0.82, width=1280, blocks=80, text_tokens=77, text_width=2048, **_SDXL
    ),
    # InstantX/SD3-Controlnet-Canny beside it.
    "./models/sd3-controlnet-canny": Released(
        trained=2.08, text=5.58, width=1536, blocks=24, text_tokens=333, text_width=4096, beside=0.6, **_KL
    ),
    "black-forest-labs/FLUX.1-dev": Released(text_tokens=512, **_FLUX1),
    # The tokens of a text, and those of the image that is changed, a megapixel.
    "black-forest-labs/FLUX.1-Kontext-dev": Released(text_tokens=512 + 4096, **_FLUX1),
    "black-forest-labs/FLUX.1-Fill-dev": Released(text_tokens=512, **_FLUX1),
    "black-forest-labs/FLUX.2-klein-base-4B": Released(
        trained=3.88, text=4.02, width=3072, blocks=25, text_width=7680, **_KLEIN
    ),
    "black-forest-labs/FLUX.2-klein-base-9B": Released(
        trained=9.08, text=8.19, width=4096, blocks=32, text_width=12288, **_KLEIN
    ),
    "Qwen/Qwen-Image": Released(**_QWEN_IMAGE),
    "Qwen/Qwen-Image-Edit": Released(**_QWEN_IMAGE),
    "Qwen/Qwen-Image-Edit-2509": Released(**_QWEN_IMAGE),
    "Tongyi-MAI/Z-Image": Released(
        trained=6.15, text=4.02, width=3840, blocks=34, text_tokens=512, text_width=2560, **_KL
    ),
    # Both experts; of a token one computes. Prompts are read by the decoder itself.
    "ByteDance-Seed/BAGEL-7B-MoT": Released(
        trained=14.1, text=0.0, width=3584, blocks=28, text_tokens=512, text_width=1, beside=0.5, **_KL
    ),
    # Every expert; of a token eight compute, beside the one that all share. Decoding counted alike, on our own VAE.
    "tencent/HunyuanImage-3.0-Instruct": Released(
        trained=81.0,
        text=0.0,
        vae=1.26,
        width=4096,
        blocks=32,
        pixels_per_token=16,
        text_tokens=512,
        text_width=1,
        decode_kb=10.2,
        decode_gradient_kb=75.3,
        kept_per_token=41,
        held_per_token=38,
        beside=0.77,
    ),
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": Released(
        trained=1.6,
        text=2.61,
        vae=0.312,
        width=2240,
        blocks=20,
        pixels_per_token=32,
        text_tokens=300,
        text_width=2304,
        decode_kb=2.4,
    ),
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": Released(
        trained=17.4,
        text=8.51,
        vae=0.41,
        width=3584,
        blocks=60,
        pixels_per_token=32,
        text_tokens=1128,
        text_width=3584,
        decode_kb=1.9,
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Released(trained=1.42, width=1536, blocks=30, **_WAN),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": Released(trained=16.4, beside=0.63, **_WAN_14B),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Released(trained=28.6, experts=2, **_WAN_14B),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Released(trained=28.6, experts=2, **_WAN_14B),
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": Released(trained=17.3, beside=0.63, **_WAN_14B),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Released(trained=5.0, width=3072, blocks=30, **_WAN_TI2V),
    "hunyuanvideo-community/HunyuanVideo": Released(text=8.15, text_tokens=256, **_HUNYUAN_VIDEO),
    # With Llava's vision tower, and a quarter of the image's tokens.
    "hunyuanvideo-community/HunyuanVideo-I2V": Released(text=8.47, text_tokens=256 + 144, **_HUNYUAN_VIDEO),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": _HUNYUAN_VIDEO15,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": _HUNYUAN_VIDEO15,
    "Lightricks/LTX-2": Released(
        trained=18.9,
        text=13.6,
        vae=1.2,
        width=4096,
        blocks=48,
        pixels_per_token=32,
        frame_factor=8,
        text_tokens=1024,
        text_width=6144,
        decode_kb=0.2,
        decodes_at_once=True,
        kept_per_token=34,
        beside=0.1,
    ),
    "zai-org/CogVideoX-2b": Released(
        trained=1.69,
        text=4.76,
        vae=0.216,
        width=1920,
        blocks=30,
        pixels_per_token=16,
        frame_factor=4,
        text_tokens=226,
        text_width=4096,
        decode_kb=92.0,
    ),
}
"""By the name on the hub that recipes give."""
