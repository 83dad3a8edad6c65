"""Prompt images in the form that engines in other processes take: PNG data URIs, one placeholder token each."""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Sequence

import torch
from PIL import Image
from torch import Tensor

from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import ImageLists, Images, Primitive

_HEAD = "data:image/png;base64,"


def shown_pictures(images: Primitive | None) -> tuple[list[str], list[list[int]]]:
    """The images of a slot in 8 bits, rounded as the models' adapters do, and the indices of those that each sample
    shows.

    images: Images, one per sample, or ImageLists, or None. Equal tensors are encoded once. Raises ConfigError for
    another type.
    """
    if images is None:
        return [], []
    if isinstance(images, Images):
        samples = [[pixels] for pixels in images.in_floats().pixels]
    elif isinstance(images, ImageLists):
        samples = images.images
    else:
        raise ConfigError(f"the slot 'image' must hold Images or ImageLists, got {type(images).__name__}")
    places: dict[int, int] = {}
    pictures: list[str] = []
    for pixels in (pixels for sample in samples for pixels in sample):
        if id(pixels) not in places:
            places[id(pixels)] = len(pictures)
            pictures.append(_data_uri(pixels))
    return pictures, [[places[id(pixels)] for pixels in sample] for sample in samples]


def _data_uri(pixels: Tensor) -> str:
    array = (pixels.clamp(0, 1) * 255).round().to("cpu", torch.uint8).permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(array).save(file, "png")
    return _HEAD + base64.b64encode(file.getvalue()).decode()


def picture(uri: str) -> Image.Image:
    """The image in a data URI of `shown_pictures`. Raises ContractError for anything else."""
    if not uri.startswith(_HEAD):
        raise ContractError(f"an image must be a data URI of a PNG file, got {uri[:40]!r}")
    return Image.open(io.BytesIO(base64.b64decode(uri.removeprefix(_HEAD), validate=True))).convert("RGB")


def one_placeholder_each(prompt: Sequence[int], placeholders: Collection[int]) -> list[int]:
    """The prompt with every run of a placeholder, which stands for one image or sound, reduced to one placeholder."""
    return [
        token
        for place, token in enumerate(prompt)
        if token not in placeholders or place == 0 or prompt[place - 1] != token
    ]
