"""Sizes of the released checkpoints of FLUX.1."""

from typing import Any

from unirl.models.released import IMAGE_VAE, Released

_FLUX1: dict[str, Any] = {**IMAGE_VAE, "trained": 11.9, "text": 4.89, "width": 3072, "blocks": 57, "text_width": 4096}

RELEASED = {
    "black-forest-labs/FLUX.1-dev": Released(text_tokens=512, **_FLUX1),
    # The tokens of a text, and those of the image that is changed, a megapixel.
    "black-forest-labs/FLUX.1-Kontext-dev": Released(text_tokens=512 + 4096, **_FLUX1),
    "black-forest-labs/FLUX.1-Fill-dev": Released(text_tokens=512, **_FLUX1),
}
