"""HunyuanImage 2.1: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, require_condition, timesteps
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.guidance import check_distilled_guidance
from unirl.models.hunyuan_image.bundle import HunyuanImageBundle
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

RELEASED_GUIDANCE = 3.25


class HunyuanImageAdapter(TextConditionedAdapter[HunyuanImageBundle]):
    """Conditions: "text" and "text_2" (words to draw) with masks, and the negative ones where guidance is on.

    Guidance is classifier-free at every step. The released pipeline's changes after its sixth step to an adaptive
    projected one with momentum, an average over all steps before; a stored step alone does not know it, so a replay
    could not be exact. Its part before that step is what is sampled here.
    """

    used_params = TextConditionedAdapter.used_params | {"distilled_guidance_scale"}
    default_sequence_length = 1000
    longest_sequence = 1000

    @property
    def geometry(self) -> Geometry:
        """(64, H / 32, W / 32) latents in patches of 1 for the released checkpoints."""
        transformer, vae = self.bundle.transformer.config, self.bundle.vae.config
        return Geometry(transformer["in_channels"], vae["spatial_compression_ratio"], transformer["patch_size"][-1])

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError also for the settings of a guidance with momentum."""
        projected = sorted(key for key in params.sampler_kwargs if key.startswith("adaptive_projected_guidance"))
        if projected:
            raise ConfigError(
                f"sampler_kwargs {projected}: this guidance averages over all steps before, which a replayed step does "
                "not know. Take them out; guidance_scale above 1 is classifier-free guidance at every step."
            )
        super().check_params(params)
        takes = self.bundle.transformer.config["guidance_embeds"]
        check_distilled_guidance(params, self.bundle.family, takes=takes, released=RELEASED_GUIDANCE)

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, h, w] of the transformer, fed 1000 sigma."""
        text, glyphs = (require_condition(conditions, slot, TextEmbedCondition) for slot in ("text", "text_2"))
        transformer = self.bundle.transformer
        dtype = next(transformer.parameters()).dtype
        scale = params.distilled_guidance_scale
        return transformer(
            hidden_states=x_R.to(dtype),
            timestep=timesteps(sigma_R, dtype),
            encoder_hidden_states=text.embeds.to(x_R.device, dtype),
            encoder_attention_mask=text.mask.to(x_R.device),
            encoder_hidden_states_2=glyphs.embeds.to(x_R.device, dtype),
            encoder_attention_mask_2=glyphs.mask.to(x_R.device),
            guidance=None if scale is None else x_R.new_full((len(x_R),), scale * TIMESTEPS_PER_SIGMA),
            return_dict=False,
        )[0]
