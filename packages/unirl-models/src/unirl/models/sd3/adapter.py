"""Stable Diffusion 3 and 3.5: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.sd3.bundle import SD3Bundle
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class SD3Adapter(TextConditionedAdapter[SD3Bundle]):
    """Conditions: "text" with pooled vectors, and "negative_text" where guidance is on."""

    default_sequence_length = 256
    longest_sequence = 512

    @property
    def geometry(self) -> Geometry:
        """(16, H / 8, W / 8) latents in patches of 2 for the released checkpoints."""
        config = self.bundle.transformer.config
        return Geometry(config["in_channels"], self.bundle.vae_scale_factor, config["patch_size"])

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C, h, w). Raises ConfigError for more patches than the position embedding has."""
        shape = super().latent_shape(params)
        factor, limit = self.geometry.vae_factor * self.geometry.patch, self._largest_side
        for name, value in (("height", params.height), ("width", params.width)):
            if value // factor > limit:
                raise ConfigError(
                    f"{name} = {value} is {value // factor} patches; the position embedding of this "
                    f"checkpoint has {limit}. Use at most {limit * factor}."
                )
        return shape

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, h, w] of the transformer, fed 1000 sigma."""
        text = require_condition(conditions, "text", TextEmbedCondition)
        transformer = self.bundle.transformer
        # The first weight, not `transformer.dtype`: adapters in another dtype may follow it.
        dtype = next(transformer.parameters()).dtype
        return transformer(
            hidden_states=x_R.to(dtype),
            timestep=sigma_R * TIMESTEPS_PER_SIGMA,
            encoder_hidden_states=text.embeds.to(x_R.device, dtype),
            pooled_projections=None if text.pooled is None else text.pooled.to(x_R.device, dtype),
            block_controlnet_hidden_states=self.control(x_R, sigma_R, conditions, params),
            return_dict=False,
        )[0]

    def control(
        self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams
    ) -> list[Tensor] | None:
        """What is added to the hidden states of the blocks; None for nothing."""
        del x_R, sigma_R, conditions, params

    @property
    def _largest_side(self) -> int:
        return self.bundle.transformer.config["pos_embed_max_size"]
