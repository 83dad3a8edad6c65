"""Reference images of a request besides its text: as many as a sample brings, of any sizes, as tokens of latents.

Shape letters: see `unirl.models`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.models.extras import from_extra
from unirl.models.patches import patched
from unirl.types.conditions import ImagePatchCondition
from unirl.types.errors import ConfigError, DataError
from unirl.types.media import ImageLists, Images, Primitive, Videos

with from_extra("diffusers"):
    from PIL import Image

REFERENCE = "reference"
"""Slot of the condition."""


def pictures_of(
    primitives: Mapping[str, Primitive], family: str, *, fewest: int, most: int | None, slot: str = "image"
) -> list[list[Tensor]] | None:
    """The images [3, H, W] of each sample, None where the request has no such slot and may lack it.

    Raises ConfigError for media of another kind, and for a sample with fewer than `fewest` or more than `most`.
    """
    media = primitives.get(slot)
    if media is None and fewest == 0:
        return None
    if isinstance(media, Images):
        samples = [[picture] for picture in media.in_floats().pixels]
    elif isinstance(media, ImageLists):
        samples = media.images
    else:
        found = "has none" if media is None else f"holds {type(media).__name__}"
        raise ConfigError(
            f"{family} needs images in the slot {slot!r} of a request, which {found}. Name them in the data."
        )
    limit = math.inf if most is None else most
    wrong = {row: len(sample) for row, sample in enumerate(samples) if not fewest <= len(sample) <= limit}
    if wrong:
        row, count = next(iter(wrong.items()))
        wanted = f"{fewest}" if fewest == most else f"{fewest} to {limit}"
        raise ConfigError(
            f"{family} takes {wanted} images per sample; sample {row} brings {count} ({len(wrong)} such samples). "
            "Change the data's media."
        )
    for sample in samples:
        for picture in sample:
            if picture.shape[0] != 3:
                raise DataError(f"a reference image is {tuple(picture.shape)}; {family} needs [3, H, W]")
    return samples


def masked_pictures(
    primitives: Mapping[str, Primitive], family: str, height: int, width: int
) -> tuple[list[Tensor], list[Tensor]]:
    """One image [3, height, width] and one mask of that shape for each sample, of the slots "image" and "mask".

    Raises ConfigError for a sample without an image or a mask, or with several.
    """
    pictures, masks = (
        [resized(each, height, width) for (each,) in pictures_of(primitives, family, fewest=1, most=1, slot=slot) or []]
        for slot in ("image", "mask")
    )
    if len(pictures) != len(masks):
        raise ConfigError(f"a request has {len(pictures)} images and {len(masks)} masks; give one mask per image.")
    return pictures, masks


def clips_of(primitives: Mapping[str, Primitive], slot: str, num_frames: int) -> list[Tensor] | None:
    """The frames [F, 3, H, W] in [0, 1] of each sample, None where the request has no such slot.

    Videos, or the frames of each as ImageLists; frames of one channel stand for three. Raises ConfigError for media of
    another kind and videos of another length, DataError for frames of different sizes.
    """
    media = primitives.get(slot)
    if media is None:
        return None
    if isinstance(media, ImageLists):
        clips = [_clip(frames, slot, row) for row, frames in enumerate(media.images)]
    elif isinstance(media, Videos):
        clips = [frames.expand(-1, 3, -1, -1) for frames in media.in_floats().unpack("frames")]
    else:
        raise ConfigError(f"the slot {slot!r} must hold videos, got {type(media).__name__}")
    for row, frames in enumerate(clips):
        if len(frames) != num_frames:
            raise ConfigError(
                f"the {slot} of sample {row} has {len(frames)} frames; {num_frames} are sampled. Cut it, or change "
                "sampling.num_frames."
            )
    return clips


def _clip(frames: Sequence[Tensor], slot: str, row: int) -> Tensor:
    sizes = sorted({tuple(frame.shape) for frame in frames})
    if len(sizes) != 1:
        raise DataError(f"the {slot} of sample {row} has frames of the sizes {sizes}; one size is needed. Resize them.")
    return torch.stack(list(frames))


def whole_sides(picture: Tensor, multiple: int) -> tuple[int, int]:
    """Height and width of an image [3, H, W], rounded down to multiples. Raises DataError if nothing is left."""
    height, width = (side // multiple * multiple for side in picture.shape[-2:])
    if not height or not width:
        raise DataError(f"a reference image is {tuple(picture.shape[-2:])} pixels; each side needs at least {multiple}")
    return height, width


def cropped(picture: Tensor, multiple: int) -> Tensor:
    """The middle of an image [3, H, W], its sides rounded down to multiples."""
    height, width = whole_sides(picture, multiple)
    top, left = (picture.shape[-2] - height) // 2, (picture.shape[-1] - width) // 2
    return picture[:, top : top + height, left : left + width]


def resized(picture: Tensor, height: int, width: int) -> Tensor:
    """An image [3, H, W] in [0, 1] by Pillow's Lanczos filter in 8 bits, as the stock pipelines resize."""
    if tuple(picture.shape[-2:]) == (height, width):
        return picture
    return filtered(picture, height, width, Image.Resampling.LANCZOS)


def filtered(picture: Tensor, height: int, width: int, filter: Image.Resampling) -> Tensor:
    """An image [3, H, W] in [0, 1] resized by a filter of Pillow in 8 bits, rounded to them at any size."""
    small = as_pil(picture).resize((width, height), filter)
    return torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1) / 255


def covered(picture: Tensor, height: int, width: int) -> Tensor:
    """An image [3, H, W] resized, its shape kept, until it covers the size, and the middle of that."""
    rows, columns = picture.shape[-2:]
    if width * rows > columns * height:
        columns, rows = width, rows * width // columns
    else:
        columns, rows = columns * height // rows, height
    picture = resized(picture, rows, columns)
    top, left = rows // 2 - height // 2, columns // 2 - width // 2
    return picture[:, top : top + height, left : left + width]


def resized_clip(frames: Tensor, height: int, width: int) -> Tensor:
    """Frames [F, 3, H, W], each `resized`."""
    return torch.stack([resized(frame, height, width) for frame in frames])


def letterboxed(picture: Tensor, height: int, width: int) -> Tensor:
    """An image [3, H, W] resized, its shape kept, to fit into the size, in the middle of black."""
    rows, columns = picture.shape[-2:]
    if width * rows < columns * height:
        columns, rows = width, rows * width // columns
    else:
        columns, rows = columns * height // rows, height
    top, left = height // 2 - rows // 2, width // 2 - columns // 2
    canvas = torch.zeros(3, height, width)
    canvas[:, top : top + rows, left : left + columns] = resized(picture, rows, columns)
    return canvas


def grey_scale(picture: Tensor) -> Tensor:
    """[H, W] of an image [3, H, W] in [0, 1], by Pillow's weights in 8 bits."""
    grey = as_pil(picture).convert("L")
    return torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).view(grey.height, grey.width) / 255


def as_pil(picture: Tensor) -> Image.Image:
    """An image [3, H, W] in [0, 1], rounded to 8 bits."""
    return Image.fromarray((picture * 255).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy())


def packed_references(samples: Sequence[Sequence[Tensor]], patch: int, device: torch.device) -> ImagePatchCondition:
    """Latents [C, h, w] of each sample's images as tokens of `patch` latent elements on a side, one row per sample."""
    tokens = [[patched(latents[None], patch)[0] for latents in sample] for sample in samples]
    width = next((each.shape[-1] for sample in tokens for each in sample), 1)
    empty = torch.zeros(0, width, device=device)
    return ImagePatchCondition.pack(
        patches=[torch.cat(sample) if sample else empty for sample in tokens],
        grids=[
            tuple((1, latents.shape[-2] // patch, latents.shape[-1] // patch) for latents in sample)
            for sample in samples
        ],
    ).to(device)


def stacked(reference: ImagePatchCondition, rows: Sequence[int]) -> Tensor:
    """The tokens [r, L, D] of rows of one grid."""
    each = reference.unpack("patches")
    return torch.stack([each[row] for row in rows])


def picture_key(picture: Tensor) -> str:
    """A hexadecimal name of an image's content."""
    digest = hashlib.blake2b(repr(tuple(picture.shape)).encode(), digest_size=20)
    digest.update(picture.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def distinct(samples: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[int]]]:
    """The images that differ, and for each sample where its own stand among them.

    Samples of one prompt share their images, so most are known without a look at their content.
    """
    pictures: list[Tensor] = []
    by_object: dict[int, int] = {}
    by_content: dict[str, int] = {}
    for sample in samples:
        for picture in sample:
            if id(picture) in by_object:
                continue
            place = by_content.setdefault(picture_key(picture), len(pictures))
            by_object[id(picture)] = place
            if place == len(pictures):
                pictures.append(picture)
    return pictures, [[by_object[id(picture)] for picture in sample] for sample in samples]
