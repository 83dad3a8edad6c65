"""Z-Image: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.guidance import refuse_guidance
from unirl.models.z_image.bundle import ZImageBundle
from unirl.models.z_image.rules import BASE_CHECKPOINT
from unirl.types.conditions import TextEmbedCondition
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class ZImageAdapter(TextConditionedAdapter[ZImageBundle]):
    """Conditions: "text" with a mask, and "negative_text" where guidance is on.

    `guidance_scale` is the stock pipeline's s of v + s (v - v_uncond), one less than the usual scale of the same
    strength. At most 1 means no guidance here, which is 0 there.
    """

    default_sequence_length = 512
    longest_sequence = 512

    @property
    def geometry(self) -> Geometry:
        """(16, H / 8, W / 8) latents in patches of 2 for the released checkpoints."""
        factor = 2 ** (len(self.bundle.vae.config["block_out_channels"]) - 1)
        return Geometry(self.bundle.transformer.config["in_channels"], factor, patch=2)

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError also for guidance of a distilled checkpoint."""
        super().check_params(params)
        if self.bundle.is_distilled:
            refuse_guidance(params, self.bundle.pretrained_model, BASE_CHECKPOINT)

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, h, w]: the transformer is fed 1 - sigma and points from noise to image."""
        del params
        text = require_condition(conditions, "text", TextEmbedCondition)
        transformer = self.bundle.transformer
        dtype = next(transformer.parameters()).dtype
        embeds, mask = text.embeds.to(x_R.device, dtype), text.mask.bool().to(x_R.device)
        # In this order, as the stock pipeline does: the transformer multiplies by 1000 again.
        time_R = (TIMESTEPS_PER_SIGMA - sigma_R * TIMESTEPS_PER_SIGMA) / TIMESTEPS_PER_SIGMA
        out = transformer(
            list(x_R.to(dtype)[:, :, None].unbind(0)),
            time_R,
            [row[counts] for row, counts in zip(embeds, mask, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(out)[:, :, 0]

    def combine(self, cond_R: Tensor, uncond_R: Tensor, scale: float) -> Tensor:
        """v + s (v - v_uncond)."""
        return cond_R + scale * (cond_R - uncond_R)
