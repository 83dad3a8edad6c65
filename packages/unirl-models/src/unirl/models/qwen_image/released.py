"""Sizes of the released checkpoints of Qwen-Image."""

from unirl.models.released import Released

QWEN_IMAGE = Released(
    trained=20.4,
    text=8.29,
    vae=0.127,
    width=3072,
    blocks=60,
    pixels_per_token=16,
    text_tokens=512,
    text_width=3584,
    decode_kb=7.0,
    decode_gradient_kb=30.7,
)
"""Every checkpoint of 20 B, those that edit included."""

RELEASED = {
    "Qwen/Qwen-Image": QWEN_IMAGE,
}
