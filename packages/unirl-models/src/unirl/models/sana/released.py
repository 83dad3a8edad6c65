"""Sizes of the released checkpoints of Sana."""

from unirl.models.released import Released

RELEASED = {
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
}
