"""Sizes of the released checkpoints of FLUX.2 klein."""

from unirl.models.released import IMAGE_VAE, Released

KLEIN_4B = Released(trained=3.88, text=4.02, width=3072, blocks=25, text_tokens=512, text_width=7680, **IMAGE_VAE)
RELEASED = {
    "black-forest-labs/FLUX.2-klein-4B": KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-base-4B": KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-base-9B": Released(
        trained=9.08,
        text=8.19,
        width=4096,
        blocks=32,
        text_tokens=512,
        text_width=12288,
        offloaded_per_token=125,
        **IMAGE_VAE,
    ),
}
