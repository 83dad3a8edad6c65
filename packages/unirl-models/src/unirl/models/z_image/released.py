"""Sizes of the released checkpoints of Z-Image."""

from unirl.models.released import IMAGE_VAE, Released

RELEASED = {
    "Tongyi-MAI/Z-Image": Released(
        trained=6.15, text=4.02, width=3840, blocks=34, text_tokens=512, text_width=2560, **IMAGE_VAE
    ),
}
