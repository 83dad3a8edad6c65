"""Stable Diffusion XL: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.diffusers_pipeline.variance_preserving import VariancePreservingAdapter
from unirl.models.sdxl.bundle import SDXLBundle
from unirl.types.conditions import TextEmbedCondition
from unirl.types.protocols import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class SDXLAdapter(VariancePreservingAdapter[SDXLBundle]):
    """Conditions: "text" with pooled vectors, and "negative_text" where guidance is on.

    An empty negative prompt is encoded like any other; the stock pipeline does so where it is given one, and takes
    zeros where it is given none. The size that the U-Net is told is that of the image, uncropped.
    """

    used_params = frozenset({"guidance_scale"})
    default_sequence_length = 77
    longest_sequence = 77

    @property
    def geometry(self) -> Geometry:
        """(4, H / 8, W / 8) latents for the released checkpoints."""
        levels = len(self.bundle.vae.config["block_out_channels"])
        return Geometry(self.bundle.unet.config["in_channels"], 2 ** (levels - 1))

    def model_output(
        self, z_R: Tensor, timestep_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams
    ) -> Tensor:
        """What the U-Net predicts, [R, C, h, w]."""
        text = require_condition(conditions, "text", TextEmbedCondition)
        dtype = next(self.bundle.unet.parameters()).dtype
        size = [params.height, params.width]
        facts = torch.tensor([*size, 0, 0, *size], dtype=torch.float32, device=z_R.device)
        return self.bundle.unet(
            z_R.to(dtype),
            timestep_R,
            encoder_hidden_states=text.embeds.to(z_R.device, dtype),
            added_cond_kwargs={
                "text_embeds": None if text.pooled is None else text.pooled.to(z_R.device, dtype),
                "time_ids": facts.expand(len(z_R), -1),
            },
            return_dict=False,
        )[0]
