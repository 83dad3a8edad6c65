"""Wan: how the family answers the adapter's questions. Shape letters: see `unirl.models`; f latent frames."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.diffusers_pipeline.normalisation import standardised, unstandardised
from unirl.models.wan.bundle import WanBundle
from unirl.types.conditions import TextEmbedCondition
from unirl.types.media import Modality
from unirl.types.protocols import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class WanAdapter(TextConditionedAdapter[WanBundle]):
    """Conditions: "text" with a mask, and "negative_text" where guidance is on. Latents are [16, f, h, w]."""

    modality = Modality.VIDEO
    used_params = TextConditionedAdapter.used_params | {"num_frames"}
    default_sequence_length = 512
    longest_sequence = 512
    fps = 16.0

    @property
    def geometry(self) -> Geometry:
        """(16, (F - 1) / 4 + 1, H / 8, W / 8) latents in patches of 1 x 2 x 2 for the released checkpoints."""
        transformer, vae = self.bundle.transformer.config, self.bundle.vae.config
        frame_patch, patch, _ = transformer["patch_size"]
        return Geometry(
            vae["z_dim"], vae["scale_factor_spatial"], patch, vae["scale_factor_temporal"], frame_patch=frame_patch
        )

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, f, h, w] of the transformer, fed 1000 sigma."""
        transformer = self.bundle.transformer
        # Not the first weight: scales and time embedding stay float32 in a checkpoint that is loaded in bfloat16.
        dtype = transformer.patch_embedding.weight.dtype
        return transformer(
            hidden_states=x_R.to(dtype),
            timestep=sigma_R * TIMESTEPS_PER_SIGMA,
            encoder_hidden_states=self.padded_text(conditions, params).to(x_R.device, dtype),
            return_dict=False,
        )[0]

    def padded_text(self, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """[R, L, D] of the full length: the model attends to the zeros after a text too."""
        text = require_condition(conditions, "text", TextEmbedCondition)
        missing = self.sequence_length(params) - text.embeds.shape[1]
        return torch.nn.functional.pad(text.embeds, (0, 0, 0, missing))

    def to_vae(self, latents: Tensor) -> Tensor:
        """Channels with their mean and deviation back."""
        return unstandardised(latents.to(self.bundle.vae.dtype), self.bundle.vae.config)

    def from_vae(self, latents: Tensor) -> Tensor:
        """Standardised channels."""
        return standardised(latents, self.bundle.vae.config)
