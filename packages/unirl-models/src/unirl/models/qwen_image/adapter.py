"""Qwen-Image: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.diffusers_pipeline.normalisation import standardised, unstandardised
from unirl.models.guidance import extrapolate
from unirl.models.patches import packed_2x2, unpacked_2x2
from unirl.models.qwen_image.bundle import QwenImageBundle
from unirl.types.conditions import TextEmbedCondition
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class QwenImageAdapter(TextConditionedAdapter[QwenImageBundle]):
    """Conditions: "text" with a mask, and "negative_text" where guidance is on.

    Latents are [16, h, w]; they are packed in patches of 2 x 2 inside the velocity only.
    """

    default_sequence_length = 512
    longest_sequence = 1024

    @property
    def geometry(self) -> Geometry:
        """(16, H / 8, W / 8) latents in patches of 2 for the released checkpoints."""
        factor = 2 ** len(self.bundle.vae.config["temperal_downsample"])
        return Geometry(self.bundle.transformer.config["in_channels"] // 4, factor, patch=2)

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, h, w] of the transformer, fed sigma."""
        del params
        return self.velocity_of(x_R, sigma_R, require_condition(conditions, "text", TextEmbedCondition))

    def velocity_of(
        self,
        x_R: Tensor,
        sigma_R: Tensor,
        text: TextEmbedCondition,
        reference_RLD: Tensor | None = None,
        grids: tuple[tuple[int, int, int], ...] = (),
    ) -> Tensor:
        """One forward of rows. reference_RLD: tokens of images next to the latents, of the same `grids` (frames, rows,
        columns) in every row; the velocity of the latents alone comes back."""
        transformer = self.bundle.transformer
        dtype = next(transformer.parameters()).dtype
        height, width = x_R.shape[-2:]
        mask = text.attention_mask
        tokens = packed_2x2(x_R).to(dtype)
        num_tokens = tokens.shape[1]
        if reference_RLD is not None:
            tokens = torch.cat([tokens, reference_RLD.to(x_R.device, dtype)], dim=1)
        out = transformer(
            hidden_states=tokens,
            timestep=sigma_R.to(dtype),
            encoder_hidden_states=text.embeds.to(x_R.device, dtype),
            encoder_hidden_states_mask=None if mask is None or bool(mask.all()) else mask.to(x_R.device),
            img_shapes=[[(1, height // 2, width // 2), *grids]] * len(x_R),
            return_dict=False,
        )[0]
        return unpacked_2x2(out[:, :num_tokens], height, width)

    def combine(self, cond_R: Tensor, uncond_R: Tensor, scale: float) -> Tensor:
        """Each token of the extrapolated velocity gets the norm of the conditional one."""
        height, width = cond_R.shape[-2:]
        cond, mixed = packed_2x2(cond_R), packed_2x2(extrapolate(cond_R, uncond_R, scale))
        norms = cond.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True)
        return unpacked_2x2(mixed * norms, height, width)

    def to_vae(self, latents: Tensor) -> Tensor:
        """One frame, channels with their mean and deviation back."""
        return unstandardised(latents.to(self.bundle.vae.dtype)[:, :, None], self.bundle.vae.config)

    def from_vae(self, latents: Tensor) -> Tensor:
        """Standardised channels, without the frame."""
        return standardised(latents, self.bundle.vae.config)[:, :, 0]
