"""Stable Diffusion 3 and 3.5: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, check_multiples, require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.sd3.bundle import SD3Bundle
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Videos
from unirl.types.protocols import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class SD3Adapter(TextConditionedAdapter[SD3Bundle]):
    """Conditions: "text" with pooled vectors, and "negative_text" where guidance is on."""

    default_sequence_length = 256
    longest_sequence = 512

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, int, int]:
        """(C, H / 8, W / 8) for the released checkpoints."""
        self.check_params(params)
        factor, patch = self.bundle.vae_scale_factor, self._patch_size
        check_multiples(params, factor * patch, reason=f"VAE {factor} x patch {patch}")
        limit = self.bundle.transformer.config["pos_embed_max_size"]
        for name, value in (("height", params.height), ("width", params.width)):
            if value // (factor * patch) > limit:
                raise ConfigError(
                    f"{name} = {value} is {value // (factor * patch)} patches; the position embedding of this "
                    f"checkpoint has {limit}. Use at most {limit * factor * patch}."
                )
        channels = self.bundle.transformer.config["in_channels"]
        return channels, params.height // factor, params.width // factor

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        """(H / 16) (W / 16) for the released checkpoints."""
        _, height, width = self.latent_shape(params)
        return (height // self._patch_size) * (width // self._patch_size)

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions) -> Tensor:
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
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor) -> Images:
        """[B, 3, H, W] float32 in [0, 1], `decode_batch_size` images at a time."""
        vae = self.bundle.vae
        pixels = []
        for part in latents.split(self.decode_batch_size):
            part = part.to(vae.dtype) / vae.config["scaling_factor"] + vae.config["shift_factor"]
            pixels.append((vae.decode(part, return_dict=False)[0].float() * 0.5 + 0.5).clamp(0, 1))
        return Images(pixels=torch.cat(pixels))

    @torch.no_grad()
    def encode_media(self, media: Images | Videos) -> Tensor:
        """Latents [B, C, h, w] float32 of images, `decode_batch_size` at a time: the mode of the posterior, shifted and
        scaled as the transformer is trained on. Raises ConfigError for other media."""
        if not isinstance(media, Images):
            raise ConfigError(f"SD3 encodes images, got {type(media).__name__}")
        vae = self.bundle.vae
        latents = []
        for part in media.pixels.split(self.decode_batch_size):
            mode = vae.encode((part * 2 - 1).to(self.bundle.device, vae.dtype)).latent_dist.mode()
            latents.append(((mode - vae.config["shift_factor"]) * vae.config["scaling_factor"]).float())
        return torch.cat(latents)

    @property
    def _patch_size(self) -> int:
        return self.bundle.transformer.config["patch_size"]
