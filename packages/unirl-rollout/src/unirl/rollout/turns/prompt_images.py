"""The images of prompts, between requests and environments."""

from __future__ import annotations

import torch

from unirl.types.errors import ConfigError
from unirl.types.media import ImageLists, Images, shown_image
from unirl.types.messages import ShownImage
from unirl.types.rollout import RolloutReq

UNDECLARED = (
    "the environment showed an image, but its class declares none. Set shows_images = True in the class of the "
    "environment or the tool."
)


def images_of_prompts(req: RolloutReq) -> ImageLists | None:
    """The images of the prompts; None where the request has none."""
    images = req.primitives.get("image")
    if isinstance(images, Images):
        return ImageLists(images=[[pixels] for pixels in images.in_floats().pixels])
    return images if isinstance(images, ImageLists) else None


def message_image(image: torch.Tensor, known: dict[int, ShownImage]) -> ShownImage:
    """An image of a prompt for an environment; each tensor is converted once."""
    if id(image) not in known:
        known[id(image)] = shown_image(image)
    return known[id(image)]


def with_images(shown: ImageLists | None, row: int, images: list[torch.Tensor]) -> ImageLists:
    """The images of prompts with those of one row replaced. Raises ConfigError if the environment may show none."""
    if shown is None:
        raise ConfigError(UNDECLARED)
    lists = [images if place == row else own for place, own in enumerate(shown.images)]
    sources = shown.sources
    if sources is not None:
        sources = [("",) * len(images) if place == row else own for place, own in enumerate(sources)]
    return ImageLists(images=lists, sources=sources)
