"""Qwen-Image-Edit: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.references import (
    REFERENCE,
    distinct,
    packed_references,
    picture_key,
    pictures_of,
    resized,
    stacked,
)
from unirl.models.embedding_cache import content_key
from unirl.models.qwen_image.adapter import QwenImageAdapter
from unirl.models.qwen_image_edit.bundle import QwenImageEditBundle
from unirl.models.ragged_rows import in_groups
from unirl.types.conditions import Condition, ImagePatchCondition, TextEmbedCondition
from unirl.types.errors import DataError
from unirl.types.media import Primitive
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

SIDE_MULTIPLE = 32
"""Pixels that the sides of a resized image divide into."""


class QwenImageEditAdapter(QwenImageAdapter):
    """Conditions: "text" and "negative_text", of an encoder that sees the images, and "reference": their latents,
    which stand next to the sampled ones as further frames.

    The published pipelines never cut a text, so max_sequence_length is refused.
    """

    _bundle: QwenImageEditBundle
    used_params = frozenset({"guidance_scale"})
    read_slots = frozenset({"text", "image"})

    @property
    def bundle(self) -> QwenImageEditBundle:
        return self._bundle

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """The latents of the images of a request as tokens, each distinct image encoded once."""
        del params
        pictures, samples = distinct(self._pictures(primitives))
        area = self.bundle.image_area
        latents = self.image_latents([resized(picture, *sides_of(picture, area)) for picture in pictures])
        by_sample = [[latents[place] for place in sample] for sample in samples]
        return {REFERENCE: packed_references(by_sample, 2, self.bundle.device)}

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, h, w]: a forward per group of rows whose images have the same sizes."""
        del params
        text = require_condition(conditions, "text", TextEmbedCondition)
        reference = require_condition(conditions, REFERENCE, ImagePatchCondition)

        def forward(rows: list[int]) -> Tensor:
            chosen = text if len(rows) == len(x_R) else text.select(rows)
            return self.velocity_of(
                x_R[rows], sigma_R[rows], chosen, stacked(reference, rows), reference.grids[rows[0]]
            )

        return in_groups(reference.grids, forward, self.bundle.any_rank)

    def _encode_texts(
        self, texts: list[str], length: int, primitives: Mapping[str, Primitive], *, is_negative: bool
    ) -> dict[str, TextEmbedCondition]:
        """Each distinct pair of an instruction and its images is encoded once."""
        del length, is_negative
        pictures, samples = distinct(self._pictures(primitives))
        encoders, area = self.bundle.text, self.bundle.condition_area
        facts = (self.bundle.family.lower(), encoders.fingerprint, area)
        digests = [picture_key(picture) for picture in pictures]

        def encode(part: list[int]) -> dict[str, TextEmbedCondition]:
            seen = [
                [resized(pictures[place], *sides_of(pictures[place], area)) for place in samples[row]] for row in part
            ]
            return {"text": encoders.encode_seen([texts[row] for row in part], seen)}

        keys = [
            content_key(*facts, text, *(digests[place] for place in sample))
            for text, sample in zip(texts, samples, strict=True)
        ]
        return self._cached_streams(keys, encode)

    def _pictures(self, primitives: Mapping[str, Primitive]) -> list[list[Tensor]]:
        found = pictures_of(primitives, self.bundle.family, fewest=1, most=self.bundle.most_images)
        return found or []


def sides_of(picture: Tensor, area: int) -> tuple[int, int]:
    """Height and width, multiples of SIDE_MULTIPLE, of about `area` pixels at the image's aspect ratio.

    Raises DataError for an image so narrow that nothing is left of one side.
    """
    ratio = picture.shape[-1] / picture.shape[-2]
    width = math.sqrt(area * ratio)
    height = width / ratio
    sides = round(height / SIDE_MULTIPLE) * SIDE_MULTIPLE, round(width / SIDE_MULTIPLE) * SIDE_MULTIPLE
    if not all(sides):
        raise DataError(
            f"an image of {picture.shape[-1]} x {picture.shape[-2]} pixels is too narrow: resized to about {area} "
            f"pixels it would be {sides[1]} x {sides[0]}. Crop it."
        )
    return sides
