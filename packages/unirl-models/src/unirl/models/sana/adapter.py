"""Sana: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.sana.bundle import SanaBundle
from unirl.models.sana.text import instructed, plain
from unirl.types.conditions import TextEmbedCondition
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class SanaAdapter(TextConditionedAdapter[SanaBundle]):
    """Conditions: "text" with a mask, and "negative_text" where guidance is on.

    Images have the size that is asked for; the stock pipeline samples the nearest of its list unless
    use_resolution_binning is off.
    """

    default_sequence_length = 300
    longest_sequence = 300

    @property
    def geometry(self) -> Geometry:
        """(32, H / 32, W / 32) latents, each a token, for the released checkpoints."""
        config = self.bundle.transformer.config
        levels = len(self.bundle.vae.config["encoder_block_out_channels"])
        return Geometry(config["in_channels"], 2 ** (levels - 1), config["patch_size"])

    def texts_to_encode(self, texts: list[str], *, is_negative: bool) -> list[str]:
        """Prompts after the request to enhance them; negative prompts as they are."""
        return [plain(text) if is_negative else instructed(text) for text in texts]

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, h, w] of the transformer, fed 1000 sigma; a learned variance is left out."""
        del params
        text = require_condition(conditions, "text", TextEmbedCondition)
        transformer = self.bundle.transformer
        dtype = next(transformer.parameters()).dtype
        output = transformer(
            x_R.to(dtype),
            encoder_hidden_states=text.embeds.to(x_R.device, dtype),
            encoder_attention_mask=None if text.attention_mask is None else text.attention_mask.to(x_R.device),
            timestep=sigma_R * (TIMESTEPS_PER_SIGMA * transformer.config["timestep_scale"]),
            return_dict=False,
        )[0]
        return output[:, : x_R.shape[1]]

    def mode_of(self, encoded: Any) -> Tensor:  # Any: as in the base
        """The latent itself: this autoencoder has no distribution."""
        return encoded.latent
