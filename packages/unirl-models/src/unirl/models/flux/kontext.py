"""FLUX.1 Kontext: the image to change follows the latents as further tokens. Shape letters: see
`unirl.models`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.references import (
    REFERENCE,
    distinct,
    packed_references,
    pictures_of,
    resized,
    stacked,
    whole_sides,
)
from unirl.models.flux.adapter import FluxTextAdapter
from unirl.models.flux.bundle import FluxKontextBundle
from unirl.models.guidance import INTERVAL_KEY
from unirl.models.patches import places
from unirl.models.ragged_rows import in_groups
from unirl.types.conditions import Condition, ImagePatchCondition, TextEmbedCondition
from unirl.types.media import Primitive
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

TRAINED_SIZES = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
    (1024, 1024),
    (1104, 944),
    (1184, 880),
    (1248, 832),
    (1328, 800),
    (1392, 752),
    (1456, 720),
    (1504, 688),
    (1568, 672),
)
"""Width and height of the images that the model was trained on."""
KEEP_SIZE = "keeps_reference_size"


class FluxKontextAdapter(FluxTextAdapter[FluxKontextBundle]):
    """Conditions: as `FluxTextAdapter`, and "reference", the image of each sample.

    The image takes the size of TRAINED_SIZES whose shape is nearest, whatever size is sampled, as in the stock
    pipeline; sampler_kwargs keeps_reference_size: true leaves it as it is, to the next multiple of a patch.
    """

    read_slots = frozenset({"text", "image"})
    used_sampler_kwargs = frozenset({INTERVAL_KEY, KEEP_SIZE})

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """Raises ConfigError for a sample without an image or with several."""
        samples = pictures_of(primitives, self.bundle.family, fewest=1, most=1)
        multiple, keeps = self.geometry.vae_factor * self.geometry.patch, params.sampler_kwargs.get(KEEP_SIZE)
        pictures, chosen = distinct(samples or [])
        fitted = [
            resized(picture, *(whole_sides(picture, multiple) if keeps else _trained_sides(picture, multiple)))
            for picture in pictures
        ]
        latents = self.image_latents(fitted)
        by_sample = [[latents[place] for place in sample] for sample in chosen]
        return {REFERENCE: packed_references(by_sample, self.geometry.patch, self.bundle.device)}

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Rows whose images have one size are one forward."""
        text = require_condition(conditions, "text", TextEmbedCondition)
        reference = require_condition(conditions, REFERENCE, ImagePatchCondition)

        def forward(rows: list[int]) -> Tensor:
            (_, height, width) = reference.grids[rows[0]][0]
            return self.forward(
                x_R[rows],
                sigma_R[rows],
                text.select(rows),
                params,
                behind=stacked(reference, rows),
                behind_places=places(1, height, width, device=x_R.device, first=1),
            )

        return in_groups(reference.grids, forward, self.bundle.any_rank)


def _trained_sides(picture: Tensor, multiple: int) -> tuple[int, int]:
    """Height and width of the nearest of TRAINED_SIZES, as multiples."""
    height, width = whole_sides(picture, multiple)
    nearest = min(TRAINED_SIZES, key=lambda size: abs(width / height - size[0] / size[1]))
    return nearest[1] // multiple * multiple, nearest[0] // multiple * multiple
