"""Sizes of the released checkpoints of Wan."""

from typing import Any

from unirl.models.released import Released

_WAN: dict[str, Any] = {
    "text": 5.68,
    "vae": 0.127,
    "pixels_per_token": 16,
    "frame_factor": 4,
    "text_tokens": 512,
    "text_width": 4096,
    "decode_kb": 20.0,
    "decode_short_kb": 18.3,
    "kept_per_token": 34,
}
_WAN_14B: dict[str, Any] = {**_WAN, "width": 5120, "blocks": 40}
_WAN_TI2V: dict[str, Any] = {**_WAN, "vae": 0.705, "pixels_per_token": 32, "decode_kb": 22.0, "decode_short_kb": None}

RELEASED = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Released(trained=1.42, width=1536, blocks=30, **_WAN),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": Released(trained=16.4, beside=0.63, **_WAN_14B),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Released(trained=28.6, experts=2, **_WAN_14B),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Released(trained=28.6, experts=2, **_WAN_14B),
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": Released(trained=17.3, beside=0.63, **_WAN_14B),
    # The control has a block for every second one of the video's.
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": Released(trained=2.15, width=1536, blocks=45, **_WAN),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Released(trained=5.0, width=3072, blocks=30, **_WAN_TI2V),
}
