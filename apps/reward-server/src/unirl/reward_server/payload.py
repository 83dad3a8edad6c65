"""Between JSON bodies and the types that scorers know.

Legend: B samples, H W pixels.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unirl.types.errors import DataError
from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest, RewardResponse

_KEYS = ("prompts", "images", "metadata", "ids")
_MODES = ("1", "L", "P", "RGB")


def parsed_request(body: bytes, max_image_pixels: int) -> RewardRequest:
    """The samples of a /score body: prompts, images (base64 PNG, one size), metadata and ids (both optional).

    Raises DataError with one sentence that names the field and the sample.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"the body must be a JSON object, got {type(content).__name__}")
    unknown = sorted(set(content) - set(_KEYS))
    if unknown:
        raise DataError(f"unknown fields {unknown}; known are {list(_KEYS)}")
    prompts = _list(content, "prompts", str)
    images = _list(content, "images", str)
    if not prompts or len(prompts) != len(images):
        raise DataError(
            f"prompts and images must be lists of one length, at least 1; got {len(prompts)}, {len(images)}"
        )
    ids = _list(content, "ids", str) if "ids" in content else [str(i) for i in range(len(prompts))]
    metadata = _list(content, "metadata", dict) if "metadata" in content else [None] * len(prompts)
    for name, value in (("ids", ids), ("metadata", metadata)):
        if len(value) != len(prompts):
            raise DataError(f"{name} has {len(value)} items for {len(prompts)} prompts")
    if len(set(ids)) != len(ids):
        raise DataError("ids repeat; every sample needs its own")
    pixels = [_pixels(text, f"images[{i}]", max_image_pixels) for i, text in enumerate(images)]
    sizes = sorted({(value.shape[2], value.shape[1]) for value in pixels})
    if len(sizes) > 1:
        raise DataError(f"images differ in size (width, height): {sizes}. Send one size a request.")
    return RewardRequest(
        sample_ids=ids,
        primitives={"text": Texts(texts=prompts)},
        generated={"image": Images(pixels=torch.stack(pixels))},
        metadata=metadata,
    )


def as_json(response: RewardResponse) -> dict[str, Any]:  # Any: JSON values
    """A response as JSON values. A reward that is not finite is null, because JSON has no NaN."""
    return {
        "ids": response.sample_ids,
        "rewards": _numbers(response.rewards),
        "components": {name: _numbers(value) for name, value in response.component_rewards.items()},
        "successes": response.successes,
        "errors": response.errors,
        "compute_s": response.compute_s,
    }


def _numbers(values_B: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values_B.tolist()]


def _list(content: dict[str, Any], name: str, kind: type) -> list[Any]:  # Any: JSON values
    value = content.get(name)
    if not isinstance(value, list):
        raise DataError(f"{name} must be a list, got {'nothing' if value is None else type(value).__name__}")
    for i, item in enumerate(value):
        if not isinstance(item, kind):
            raise DataError(f"{name}[{i}] must be a {kind.__name__}, got {type(item).__name__}")
    return value


def _pixels(text: str, where: str, max_image_pixels: int) -> Tensor:
    """float32 [3, H, W] in [0, 1] of a base64 PNG."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where} is not base64: {error}") from error
    try:
        with Image.open(BytesIO(data), formats=["PNG"]) as picture:
            width, height = picture.size
            if width * height > max_image_pixels:
                raise DataError(f"{where} is {width} x {height}, more than {max_image_pixels} pixels")
            if picture.mode not in _MODES:
                raise DataError(f"{where} has mode {picture.mode}; send 8-bit RGB without alpha")
            bytes_HW3 = np.array(picture.convert("RGB"))
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{where} is not a PNG: {error}") from error
    return torch.from_numpy(bytes_HW3).permute(2, 0, 1).float() / 255
