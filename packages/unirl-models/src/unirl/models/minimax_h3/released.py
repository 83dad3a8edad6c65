"""Sizes of the released checkpoint of MiniMax-H3."""

from unirl.models.released import Released

RELEASED = {
    "MiniMaxAI/MiniMax-H3": Released(
        trained=33.1,
        text=25.2,  # of 33.4: the layers that it reads
        vae=2.6,
        width=5376,
        blocks=52,  # two refine the text
        pixels_per_token=32,
        frame_factor=3.4,  # 17 frames in 5 latent ones
        text_tokens=512,
        text_width=5120,
        decode_kb=4.3,
        beside=0.15,
    ),
}
