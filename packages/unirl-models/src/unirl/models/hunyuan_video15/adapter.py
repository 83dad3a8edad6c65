"""HunyuanVideo 1.5: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.models.adapter import require_condition, timesteps
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.hunyuan_video.latents import ScaledVideoLatents
from unirl.models.hunyuan_video15.bundle import HunyuanVideo15Bundle
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class HunyuanVideo15Adapter(ScaledVideoLatents[HunyuanVideo15Bundle]):
    """Conditions: "text" and "text_2" (words to draw) with masks, and the negative ones where guidance is on.

    The transformer is fed twice the channels and a mask: the latents, the latents of given frames, and where these are.
    """

    used_params = TextConditionedAdapter.used_params | {"num_frames"}
    default_sequence_length = 1000
    longest_sequence = 1000

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError also if a distilled checkpoint is asked for guidance."""
        super().check_params(params)
        if self.bundle.is_distilled and params.uses_guidance:
            raise ConfigError(
                f"guidance_scale = {params.guidance_scale}: {self.bundle.pretrained_model} was distilled to work "
                "without guidance. Set sampling.guidance_scale: 1."
            )

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, f, h, w] of the transformer, fed 1000 sigma."""
        del params
        text, glyphs = (require_condition(conditions, slot, TextEmbedCondition) for slot in ("text", "text_2"))
        transformer = self.bundle.transformer
        dtype = next(transformer.parameters()).dtype
        return transformer(
            hidden_states=torch.cat([x_R, self.given_frames(x_R, conditions)], dim=1).to(dtype),
            timestep=timesteps(sigma_R, dtype),
            encoder_hidden_states=text.embeds.to(x_R.device, dtype),
            encoder_attention_mask=text.mask.to(x_R.device),
            encoder_hidden_states_2=glyphs.embeds.to(x_R.device, dtype),
            encoder_attention_mask_2=glyphs.mask.to(x_R.device),
            image_embeds=self.image_embeds(x_R, conditions).to(dtype),
            return_dict=False,
        )[0]

    def given_frames(self, x_R: Tensor, conditions: Conditions) -> Tensor:
        """[R, C + 1, f, h, w]: latents of the frames that a request brings and a mask of them; zeros without any."""
        del conditions
        return x_R.new_zeros(len(x_R), x_R.shape[1] + 1, *x_R.shape[2:])

    def image_embeds(self, x_R: Tensor, conditions: Conditions) -> Tensor:
        """[R, L, D] features of the given image. None at all without one: the stock pipeline masks zeros out."""
        del conditions
        return x_R.new_zeros(len(x_R), 0, self.bundle.transformer.config["image_embed_dim"])
