"""Qwen-Image that paints into an image: what a mask leaves out is kept.

Equal to QwenImageInpaintPipeline of diffusers at strength 1, which draws the latents of the image from its posterior
where their mode is taken here. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.references import grey_scale, masked_pictures
from unirl.models.qwen_image.adapter import QwenImageAdapter
from unirl.sde.known_latents import keeping
from unirl.sde.loop import Velocity
from unirl.types.conditions import Condition, ImageLatentCondition
from unirl.types.media import Primitive
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

KNOWN = "known"
"""Slot of the condition."""


class QwenImageInpaintAdapter(QwenImageAdapter):
    """Conditions besides those of `QwenImageAdapter`: "known" [C + 1, h, w], latents of the image, and 1 where they are
    to be made anew.

    A request brings an "image" and a "mask" per sample, white where to paint; both are resized to the size that is
    sampled. The transformer sees no mask: what is kept walks from the noise to the image on its own.
    """

    read_slots = QwenImageAdapter.read_slots | {"image", "mask"}

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """Raises ConfigError for a sample without an image or a mask, or with several."""
        pictures, masks = masked_pictures(primitives, self.bundle.family, params.height, params.width)
        latents = torch.stack(self.image_latents(pictures))
        is_new = torch.stack([grey_scale(mask) >= 0.5 for mask in masks])[:, None].to(latents)
        is_new = torch.nn.functional.interpolate(is_new, size=latents.shape[-2:], mode="nearest")
        return {KNOWN: ImageLatentCondition(latents=torch.cat([latents, is_new], dim=1))}

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """Guided as Qwen-Image is, then `keeping` what the mask leaves out."""
        known = require_condition(conditions, KNOWN, ImageLatentCondition).latents.to(self.bundle.device)
        of_text = {slot: condition for slot, condition in conditions.items() if slot != KNOWN}
        return keeping(super().bind(of_text, params), known[:, :-1], known[:, -1:] > 0.5)
