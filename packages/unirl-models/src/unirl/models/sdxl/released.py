"""Sizes of the released checkpoints of Stable Diffusion XL."""

from typing import Any

from unirl.models.released import IMAGE_VAE, Released

_SDXL: dict[str, Any] = {**IMAGE_VAE, "pixels_per_token": 32}

RELEASED = {
    # Its blocks hold attention at two sizes and convolutions; these numbers stand for both.
    "stabilityai/stable-diffusion-xl-base-1.0": Released(
        trained=2.57, text=0.82, width=1280, blocks=80, text_tokens=77, text_width=2048, **_SDXL
    ),
}
