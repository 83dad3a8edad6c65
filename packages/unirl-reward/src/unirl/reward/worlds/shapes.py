"""The verifier of the shapes world: does an image show exactly what its prompt asks for?

Pixels are named by colour, connected regions become objects, and the shape of an object is the template with the most
overlap in its bounding box. Shape letters: B images, H W pixels, K objects found in the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from unirl.reward.worlds.shapes_grammar import COLORS, PALETTE, RELATIONS, SHAPES, PromptSpec, ShapeObject, parse_prompt

BACKGROUND_VALUE = 0.4
"""Pixels whose largest channel is below this are background: half way down an antialiased edge."""
COLOR_RADIUS = 0.6
"""A pixel farther than this from every colour (as RGB over its largest channel) has no name, as white or cyan."""
MIN_CLUTTER_PIXELS = 10
"""Smaller regions are ignored; an object as rendered has 45 to 125 pixels."""
MIN_OBJECT_PIXELS = 24
"""Smaller regions are clutter: they count as an object of no shape."""
MIN_OVERLAP = 0.7
"""Least intersection over union with the template of a shape."""
MAX_ASPECT = 1.6
"""Largest ratio of the sides of an object's bounding box."""
RELATION_MARGIN = 0.2
"""Least distance of the centres along the axis of a relation, as a fraction of the side of the image."""
RELATION_WEIGHT = 0.25
"""Share of the relation in the soft score of a position prompt."""

_TEMPLATE_SIDE = 16
_UNNAMED = len(COLORS)
_NO_SHAPE = len(SHAPES)
_NUM_CLASSES = (len(COLORS) + 1) * (len(SHAPES) + 1)


@dataclass(frozen=True)
class FoundObject:
    """A region of an image."""

    color: str | None
    """None: the region has no colour of the palette."""
    shape: str | None
    """None: no template fits."""
    center_yx: tuple[float, float]
    """Pixels from the top left."""
    area: int
    """Pixels."""


@dataclass(frozen=True)
class Verdict:
    """The verifier's answer for one image."""

    strict: bool
    """The image shows what was asked for and nothing else."""
    soft: float
    """Partial credit in [0, 1]; 1 exactly when strict."""
    details: tuple[FoundObject, ...]
    """Everything found, clutter included."""


@dataclass(frozen=True)
class Objects:
    """All objects of a batch, one entry per object."""

    image_K: np.ndarray
    color_K: np.ndarray
    """Index into COLORS; len(COLORS): a colour that is not of the palette."""
    shape_K: np.ndarray
    """Index into SHAPES; len(SHAPES): no template fits."""
    center_K2: np.ndarray
    """y, x in pixels from the top left."""
    area_K: np.ndarray
    """Pixels."""


@dataclass(frozen=True)
class _Request:
    """A prompt as numbers: the histogram over (colour, shape) classes, and the relation between two classes."""

    histogram: np.ndarray
    axis: int
    sign: int
    """0: no relation is asked for; else the sign of first minus second along `axis` (0 vertical, 1 horizontal)."""
    first: int
    second: int


def verify(image: Tensor | np.ndarray, spec: PromptSpec) -> Verdict:
    """Judge one image [3, H, W], float in [0, 1] or uint8, against `spec`."""
    pixels_BCHW = as_unit_float(image)[None]
    objects = find_objects(pixels_BCHW)
    strict_B, soft_B = _judge(objects, [_request(spec)], pixels_BCHW.shape[-1])
    details = tuple(
        FoundObject(
            color=None if color == _UNNAMED else COLORS[color],
            shape=None if shape == _NO_SHAPE else SHAPES[shape],
            center_yx=(float(center[0]), float(center[1])),
            area=int(area),
        )
        for color, shape, center, area in zip(
            objects.color_K, objects.shape_K, objects.center_K2, objects.area_K, strict=True
        )
    )
    return Verdict(bool(strict_B[0]), float(soft_B[0]), details)


def score_shapes(pixels_BCHW: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Strict and soft scores of a batch.

    pixels_BCHW: [B, 3, H, W] on any device, float in [0, 1] or uint8; values outside the range are clipped.
    Returns strict_B, soft_B: float32 on the CPU; strict is 0 or 1, soft lies in [0, 1] and is 1 exactly when strict is.
    Soft is (exact matches + half of the matches in colour or shape alone) / max(asked for, found); a position prompt
    takes RELATION_WEIGHT of it from the relation.
    Raises ValueError for a prompt outside the grammar, or when the number of prompts is not B.
    """
    if pixels_BCHW.ndim != 4 or pixels_BCHW.shape[1] != 3 or len(prompts) != pixels_BCHW.shape[0]:
        raise ValueError(f"expected pixels [B, 3, H, W] and B prompts, got {tuple(pixels_BCHW.shape)}, {len(prompts)}")
    requests = [_request(parse_prompt(prompt)) for prompt in prompts]
    if not requests:
        return torch.zeros(0), torch.zeros(0)
    objects = find_objects(as_unit_float(pixels_BCHW))
    strict_B, soft_B = _judge(objects, requests, pixels_BCHW.shape[-1])
    return torch.from_numpy(strict_B.astype(np.float32)), torch.from_numpy(soft_B.astype(np.float32))


def as_unit_float(image: Tensor | np.ndarray) -> np.ndarray:
    """Pixels of any shape as float32 in [0, 1], clipped; uint8 is divided by 255."""
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
    if array.dtype == np.uint8:
        return array.astype(np.float32) / 255.0
    return np.clip(array.astype(np.float32, copy=False), 0.0, 1.0)


def _name_pixels(pixels_BCHW: np.ndarray) -> np.ndarray:
    """Index of the colour of every pixel, uint8 [B, H, W]; _UNNAMED: none of the palette, 255: background.

    Colours are compared after division by the largest channel, which removes the darkening of antialiased edges.
    """
    value_BHW = pixels_BCHW.max(axis=1)
    scaled_BCHW = pixels_BCHW / np.maximum(value_BHW, 1e-3)[:, None]
    palette = np.array([PALETTE[color] for color in COLORS], dtype=np.float32)
    palette /= palette.max(axis=1, keepdims=True)
    squared = np.stack([((scaled_BCHW - rgb[:, None, None]) ** 2).sum(axis=1) for rgb in palette])
    names_BHW = squared.argmin(axis=0).astype(np.uint8)
    names_BHW[squared.min(axis=0) > COLOR_RADIUS**2] = _UNNAMED
    names_BHW[value_BHW < BACKGROUND_VALUE] = 255
    return names_BHW


def find_objects(pixels_BCHW: np.ndarray) -> Objects:
    """Connected regions of one colour with at least MIN_CLUTTER_PIXELS pixels, for the whole batch at once.

    pixels_BCHW: float in [0, 1].
    """
    names_BHW = _name_pixels(pixels_BCHW)
    num_images, height, width = names_BHW.shape
    num_names = len(COLORS) + 1
    masks = names_BHW[None] == np.arange(num_names, dtype=np.uint8)[:, None, None, None]
    volume = masks.reshape(num_names * num_images, height, width)
    connectivity = np.zeros((3, 3, 3), dtype=bool)
    connectivity[1] = True
    labels, num_regions = ndimage.label(volume, structure=connectivity)
    plane_N, y_N, x_N = np.nonzero(labels)
    label_N = labels[plane_N, y_N, x_N] - 1
    area = np.bincount(label_N, minlength=num_regions)
    plane = np.zeros(num_regions, dtype=np.int64)
    plane[label_N] = plane_N
    center = np.stack([np.bincount(label_N, weights=axis, minlength=num_regions) for axis in (y_N, x_N)], axis=1)
    low, high = np.full((num_regions, 2), max(height, width)), np.full((num_regions, 2), -1)
    for column, axis in enumerate((y_N, x_N)):
        np.minimum.at(low[:, column], label_N, axis)
        np.maximum.at(high[:, column], label_N, axis)
    kept = np.flatnonzero(area >= MIN_CLUTTER_PIXELS)
    return Objects(
        image_K=plane[kept] % num_images,
        color_K=plane[kept] // num_images,
        shape_K=_name_shapes(labels, kept, plane[kept], low[kept], high[kept] + 1, area[kept]),
        center_K2=center[kept] / area[kept, None],
        area_K=area[kept],
    )


def _name_shapes(
    labels: np.ndarray, region_K: np.ndarray, plane_K: np.ndarray, low_K2: np.ndarray, high_K2: np.ndarray, area_K
) -> np.ndarray:
    """Index of the template with the largest overlap in the bounding box of each region; _NO_SHAPE where none fits."""
    steps = (np.arange(_TEMPLATE_SIDE) + 0.5) / _TEMPLATE_SIDE
    size_K2 = high_K2 - low_K2
    grid = (low_K2[:, :, None] + steps * size_K2[:, :, None]).astype(np.int64)
    crop = labels[plane_K[:, None, None], grid[:, 0, :, None], grid[:, 1, None, :]] == region_K[:, None, None] + 1
    templates = _templates()
    crop_KP = crop.reshape(len(region_K), _TEMPLATE_SIDE**2).astype(np.float32)
    both = crop_KP @ templates.T
    overlap = both / (crop_KP.sum(1, keepdims=True) + templates.sum(1) - both)
    aspect = size_K2.max(axis=1) / size_K2.min(axis=1) if len(region_K) else np.zeros(0)
    fits = (overlap.max(axis=1) >= MIN_OVERLAP) & (aspect <= MAX_ASPECT) & (area_K >= MIN_OBJECT_PIXELS)
    return np.where(fits, overlap.argmax(axis=1), _NO_SHAPE)


@lru_cache(maxsize=1)
def _templates() -> np.ndarray:
    """The shapes drawn to fill a square, float32 [shapes, _TEMPLATE_SIDE ** 2]."""
    steps = (np.arange(_TEMPLATE_SIDE) + 0.5) / _TEMPLATE_SIDE * 2 - 1
    y, x = steps[:, None], steps[None, :]
    drawn = {"circle": x**2 + y**2 <= 1, "square": (x <= 1) & (y <= 1), "triangle": 2 * np.abs(x) <= y + 1}
    return np.stack([drawn[shape].reshape(-1) for shape in SHAPES]).astype(np.float32)


@lru_cache(maxsize=4096)
def _request(spec: PromptSpec) -> _Request:
    histogram = class_histogram(spec.objects)
    if spec.relation is None:
        return _Request(histogram, axis=0, sign=0, first=-1, second=-1)
    index = RELATIONS.index(spec.relation)
    sign = 1 if spec.relation in ("right of", "below") else -1
    first, second = (_class_of(item) for item in spec.objects)
    return _Request(histogram, axis=1 if index < 2 else 0, sign=sign, first=first, second=second)


def _judge(objects: Objects, requests: Sequence[_Request], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Compare what was found with what was asked for; bool strict_B and float64 soft_B."""
    strict_B, soft_B = match_objects(objects, np.stack([request.histogram for request in requests]))
    sign_B = np.array([request.sign for request in requests])
    class_K = objects.color_K * (len(SHAPES) + 1) + objects.shape_K
    holds_B = _relation_holds(objects, class_K, requests, side)
    soft_B = np.where(sign_B == 0, soft_B, (1 - RELATION_WEIGHT) * soft_B + RELATION_WEIGHT * holds_B)
    return strict_B & ((sign_B == 0) | holds_B), soft_B


def match_objects(objects: Objects, asked_BN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (image has exactly the objects asked for, bool [B]) and partial credit (float64 [B]).

    asked_BN: histograms by `class_histogram`.
    """
    num_images = len(asked_BN)
    class_K = objects.color_K * (len(SHAPES) + 1) + objects.shape_K
    found = np.bincount(objects.image_K * _NUM_CLASSES + class_K, minlength=num_images * _NUM_CLASSES)
    found = found.reshape(num_images, len(COLORS) + 1, len(SHAPES) + 1)
    asked = asked_BN.reshape(found.shape)
    exact = np.minimum(found, asked)
    found_rest, asked_rest = found - exact, asked - exact
    by_color = np.minimum(found_rest.sum(2), asked_rest.sum(2))[:, : len(COLORS)].sum(1)
    by_shape = np.minimum(found_rest.sum(1), asked_rest.sum(1))[:, : len(SHAPES)].sum(1)
    total = np.maximum(found.sum((1, 2)), asked.sum((1, 2)))
    soft_B = (exact.sum((1, 2)) + 0.5 * np.maximum(by_color, by_shape)) / total
    return (found == asked).all(axis=(1, 2)), soft_B


def class_histogram(items: Sequence[ShapeObject]) -> np.ndarray:
    """How many objects of each (colour, shape) class `items` are."""
    return np.bincount([_class_of(item) for item in items], minlength=_NUM_CLASSES)


def _class_of(item: ShapeObject) -> int:
    return COLORS.index(item.color) * (len(SHAPES) + 1) + SHAPES.index(item.shape)


def _relation_holds(objects: Objects, class_K: np.ndarray, requests: Sequence[_Request], side: int) -> np.ndarray:
    """True if both objects were found, apart in the direction asked for; False where no relation is asked for."""
    axis_B = np.array([request.axis for request in requests])
    sign_B = np.array([request.sign for request in requests])
    coordinate_K = objects.center_K2[np.arange(len(class_K)), axis_B[objects.image_K]]
    offset_B = np.zeros(len(requests))
    first_B = np.array([request.first for request in requests])
    second_B = np.array([request.second for request in requests])
    for wanted_B, weight in ((first_B, 1.0), (second_B, -1.0)):
        is_wanted_K = class_K == wanted_B[objects.image_K]
        place_B = np.full(len(requests), np.nan)
        place_B[objects.image_K[is_wanted_K]] = coordinate_K[is_wanted_K]
        offset_B += weight * place_B
    return np.nan_to_num(offset_B * sign_B, nan=-1.0) > RELATION_MARGIN * side
