"""Sizes of the released checkpoint of FLUX.2 dev."""

from unirl.models.released import IMAGE_VAE, Released

RELEASED = {
    "black-forest-labs/FLUX.2-dev": Released(
        trained=32.2, text=24.0, width=6144, blocks=56, text_tokens=512, text_width=15360, **IMAGE_VAE
    )
}
