"""HunyuanVideo: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.guidance import check_distilled_guidance
from unirl.models.hunyuan_video.bundle import HunyuanVideoBundle
from unirl.models.hunyuan_video.latents import ScaledVideoLatents
from unirl.types.conditions import TextEmbedCondition
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class HunyuanVideoAdapter(ScaledVideoLatents[HunyuanVideoBundle]):
    """Conditions: "text" with mask and pooled vectors, and "negative_text" where guidance is on.

    The released model takes its guidance as an input, `distilled_guidance_scale`; `guidance_scale` above 1 is
    classifier-free guidance on top, the `true_cfg_scale` of the stock pipeline.
    """

    used_params = TextConditionedAdapter.used_params | {"num_frames", "distilled_guidance_scale"}
    default_sequence_length = 256
    longest_sequence = 256

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError also if a distilled checkpoint gets no guidance as an input."""
        super().check_params(params)
        takes = self.bundle.transformer.config["guidance_embeds"]
        check_distilled_guidance(params, self.bundle.family, takes=takes, released=self.bundle.released_guidance)

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, f, h, w] of the transformer, fed 1000 sigma and 1000 times the distilled guidance."""
        text = require_condition(conditions, "text", TextEmbedCondition)
        transformer = self.bundle.transformer
        dtype = next(transformer.parameters()).dtype
        scale = params.distilled_guidance_scale
        return transformer(
            hidden_states=self.hidden_states(x_R, conditions).to(dtype),
            timestep=sigma_R * TIMESTEPS_PER_SIGMA,
            encoder_hidden_states=text.embeds.to(x_R.device, dtype),
            encoder_attention_mask=text.mask.to(x_R.device),
            pooled_projections=None if text.pooled is None else text.pooled.to(x_R.device, dtype),
            guidance=None if scale is None else x_R.new_full((len(x_R),), scale * TIMESTEPS_PER_SIGMA),
            return_dict=False,
        )[0]

    def hidden_states(self, x_R: Tensor, conditions: Conditions) -> Tensor:
        """What the transformer reads: the latents, and what else a task gives it."""
        del conditions
        return x_R
