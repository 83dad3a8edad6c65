"""Sizes of the released checkpoints of HunyuanImage 2.1."""

from unirl.models.released import Released

RELEASED = {
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
}
