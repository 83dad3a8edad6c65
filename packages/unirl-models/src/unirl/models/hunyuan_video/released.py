"""Sizes of the released checkpoints of HunyuanVideo."""

from typing import Any

from unirl.models.released import Released

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

RELEASED = {
    "hunyuanvideo-community/HunyuanVideo": Released(text=8.15, text_tokens=256, **_HUNYUAN_VIDEO),
    # With Llava's vision tower, and a quarter of the image's tokens.
    "hunyuanvideo-community/HunyuanVideo-I2V": Released(text=8.47, text_tokens=256 + 144, **_HUNYUAN_VIDEO),
}
