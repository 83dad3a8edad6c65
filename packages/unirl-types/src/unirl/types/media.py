"""What goes in and comes out of a model: texts, images, videos, audio, embeddings.

Pixels are float in [0, 1], channels first; of what a model made also uint8, a quarter of the memory.
Legend: B samples, C channels, T frames, H W pixels, L waveform samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Self

import torch
from torch import Tensor

from unirl.types.batch import Batch, packed, per_sample, shared
from unirl.types.errors import ContractError
from unirl.types.messages import ShownImage


class Modality(Enum):
    """What a segment or condition is made of."""

    TEXT = "text"
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"
    MULTIMODAL = "multimodal"


def _check_media(tensor: Tensor, name: str, layout: str, ndims: tuple[int, ...], *, has_bytes: bool = False) -> None:
    if tensor.ndim not in ndims or not (tensor.is_floating_point() or (has_bytes and tensor.dtype == torch.uint8)):
        kinds = "float or uint8" if has_bytes else "float"
        raise ContractError(f"{name} must be {kinds} {layout}, got {tensor.dtype} {tuple(tensor.shape)}")


def pixel_bytes(pixels: Tensor) -> Tensor:
    """Pixels rounded to uint8; floats outside [0, 1] are cut."""
    return pixels if pixels.dtype == torch.uint8 else (pixels.clamp(0, 1) * 255).round().byte()


def pixel_floats(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1]; of uint8 the value / 255 in float32, floats as they are."""
    # In place: a separate quotient would take as much memory again.
    return pixels.float().div_(255) if pixels.dtype == torch.uint8 else pixels


def shown_image(pixels: Tensor) -> ShownImage:
    """An image [3, H, W] as messages show it. Raises ContractError for other channels."""
    if pixels.ndim != 3 or pixels.shape[0] != 3:
        raise ContractError(f"an image of a message must be [3, H, W], got {list(pixels.shape)}")
    height, width = pixels.shape[1:]
    return ShownImage(height, width, pixel_bytes(pixels).cpu().permute(1, 2, 0).contiguous().numpy().tobytes())


def shown_pixels(image: ShownImage) -> Tensor:
    """An image of a message, float32 [3, H, W] in [0, 1]."""
    flat = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255


@dataclass(kw_only=True, eq=False)
class Texts(Batch):
    """A batch of strings."""

    texts: list[str] = per_sample(default_factory=list)


@dataclass(kw_only=True, eq=False)
class Images(Batch):
    """A batch of images of one size."""

    pixels: Tensor = per_sample()
    """[B, C, H, W], float in [0, 1] or uint8."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_media(self.pixels, "Images.pixels", "[B, C, H, W]", (4,), has_bytes=True)

    def in_bytes(self) -> Self:
        """The same, rounded to uint8."""
        return self.replace(pixels=pixel_bytes(self.pixels))

    def in_floats(self) -> Self:
        """The same in [0, 1]."""
        return self.replace(pixels=pixel_floats(self.pixels))

    def sized(self) -> SizedImages:
        """The same images in the form that allows different sizes."""
        return SizedImages(images=list(self.pixels))

    @classmethod
    def from_list(cls, images: list[Tensor], *, pad: bool = False) -> Self:
        """Stack [C, H, W] images. Differing sizes raise ContractError unless `pad` (zeros right, bottom)."""
        if not images:
            raise ContractError("cannot stack an empty list of images, their size would be unknown")
        wrong = sorted({tuple(image.shape) for image in images if image.ndim != 3})
        channels = sorted({image.shape[0] for image in images if image.ndim == 3})
        if wrong or len(channels) > 1:
            raise ContractError(f"images must be [C, H, W] with one C; found shapes {wrong} and channels {channels}")
        sizes = {tuple(image.shape) for image in images}
        if len(sizes) > 1:
            if not pad:
                raise ContractError(f"images differ in size: {sorted(sizes)}. Resize them or pass pad=True.")
            height = max(image.shape[-2] for image in images)
            width = max(image.shape[-1] for image in images)
            images = [
                torch.nn.functional.pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2]))
                for image in images
            ]
        return cls(pixels=torch.stack(images))


@dataclass(kw_only=True, eq=False)
class ImageLists(Batch):
    """Any number of images per sample, of any sizes: what prompts of a vision-language model show."""

    images: list[list[Tensor]] = per_sample(default_factory=list)
    """[C, H, W] each, float in [0, 1]."""
    sources: list[tuple[str, ...]] | None = per_sample(default=None)
    """What each image is called, for people to look it up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for sample in self.images:
            for image in sample:
                _check_media(image, "an image of ImageLists", "[C, H, W]", (3,))


@dataclass(kw_only=True, eq=False)
class SizedImages(Batch):
    """One image per sample, each of its own size: what a model makes that chooses the size."""

    images: list[Tensor] = per_sample(default_factory=list)
    """[C, H, W] each, float in [0, 1] or uint8."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for image in self.images:
            _check_media(image, "an image of SizedImages", "[C, H, W]", (3,), has_bytes=True)

    def of_one_size(self) -> Images:
        """The same where all have one size. Raises ContractError if they differ."""
        return Images.from_list(self.images)


@dataclass(kw_only=True, eq=False)
class Videos(Batch):
    """A batch of videos, frames of all samples end to end. Build with `Videos.pack(frames=[[T, C, H, W], ...])`."""

    frames: Tensor = packed()
    """[sum T, C, H, W], float in [0, 1] or uint8."""
    fps: float | None = shared(default=None)
    """Frames per second."""
    audio: Audios | None = per_sample(default=None)
    """The sound of each video, where its model makes it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_media(self.frames, "Videos.frames", "[sum T, C, H, W]", (4,), has_bytes=True)

    def in_bytes(self) -> Self:
        """The same, rounded to uint8."""
        return self.replace(frames=pixel_bytes(self.frames))

    def in_floats(self) -> Self:
        """The same in [0, 1]."""
        return self.replace(frames=pixel_floats(self.frames))


@dataclass(kw_only=True, eq=False)
class Audios(Batch):
    """A batch of waveforms end to end. Build with `Audios.pack(waveform=[...])`."""

    waveform: Tensor = packed()
    """[sum L] or [sum L, C], float in [-1, 1]."""
    sample_rate: int | None = shared(default=None)
    """Samples per second."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_media(self.waveform, "Audios.waveform", "[sum L] or [sum L, C]", (1, 2))


@dataclass(kw_only=True, eq=False)
class Embeddings(Batch):
    """A batch of plain vectors or sequences of vectors."""

    embeds: Tensor = per_sample()
    """[B, ...]."""


Primitive = Texts | Images | ImageLists | SizedImages | Videos | Audios | Embeddings
