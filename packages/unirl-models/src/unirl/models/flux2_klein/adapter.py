"""FLUX.2 Klein: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.flux2_klein.bundle import Flux2KleinBundle
from unirl.sde.schedule import Convention, SigmaSchedule
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.protocols import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class Flux2KleinAdapter(TextConditionedAdapter[Flux2KleinBundle]):
    """Conditions: "text", and "negative_text" where guidance is on.

    Latents are [128, h, w]: patches of 2 x 2 of the VAE's, standardised by the statistics of its batch normalisation.
    The stock pipeline's negative prompt is always "".
    """

    default_sequence_length = 512
    longest_sequence = 512

    @property
    def geometry(self) -> Geometry:
        """(128, H / 16, W / 16) latents for the released checkpoints."""
        factor = 2 ** len(self.bundle.vae.config["block_out_channels"])
        return Geometry(self.bundle.transformer.config["in_channels"], factor)

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError for what this family would ignore, guidance of a distilled checkpoint included."""
        super().check_params(params)
        if self.bundle.is_distilled and (params.uses_guidance or params.negative_prompt):
            raise ConfigError(
                f"{self.bundle.pretrained_model} is distilled to sample without guidance; got guidance_scale = "
                f"{params.guidance_scale}, negative_prompt = {params.negative_prompt!r}. Set sampling.guidance_scale: "
                "1 and sampling.negative_prompt: null, or use a base checkpoint (FLUX.2-klein-base-4B, -9B)."
            )

    def schedule(self, convention: Convention | None) -> SigmaSchedule:
        """The empirical shift, unless the checkpoint's is static."""
        config = self.bundle.scheduler_config
        named = "empirical" if convention is None and config.get("use_dynamic_shifting") else convention
        return SigmaSchedule.from_scheduler_config(config, named)

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, h, w] of the transformer, fed sigma."""
        del params
        text = require_condition(conditions, "text", TextEmbedCondition)
        transformer = self.bundle.transformer
        dtype = next(transformer.parameters()).dtype
        height, width = x_R.shape[-2:]
        tokens = transformer(
            hidden_states=x_R.flatten(2).mT.to(dtype),
            timestep=sigma_R,
            encoder_hidden_states=text.embeds.to(x_R.device, dtype),
            img_ids=places(1, height, width, 1, x_R.device),
            txt_ids=places(1, 1, 1, text.embeds.shape[1], x_R.device),
            return_dict=False,
        )[0]
        return tokens.mT.unflatten(2, (height, width))

    def to_vae(self, latents: Tensor) -> Tensor:
        """Mean and deviation back, patches taken apart."""
        latents = latents.to(self.bundle.vae.dtype)
        mean, std = self._moments(latents)
        return pixel_shuffle(latents * std + mean, 2)

    def from_vae(self, latents: Tensor) -> Tensor:
        """Standardised patches."""
        latents = pixel_unshuffle(latents, 2)
        mean, std = self._moments(latents)
        return (latents - mean) / std

    def _moments(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.bundle.vae.bn
        std = (norm.running_var + self.bundle.vae.config["batch_norm_eps"]).sqrt()
        return norm.running_mean[:, None, None].to(latents), std[:, None, None].to(latents)


def places(frames: int, rows: int, columns: int, layers: int, device: torch.device) -> Tensor:
    """[frames rows columns layers, 4] coordinates of tokens in the order of their axes, the last one fastest."""
    axes = [torch.arange(size, device=device) for size in (frames, rows, columns, layers)]
    return torch.cartesian_prod(*axes)
