"""Stable Diffusion XL: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.diffusers_pipeline.variance_preserving import VariancePreservingAdapter
from unirl.models.sdxl.bundle import SDXLBundle
from unirl.types.conditions import NEGATIVE, Condition, TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

ZERO_NEGATIVE_KEY = "zeros_for_empty_prompt"
"""In `sampler_kwargs`: true guides against zeros instead of an encoded empty negative prompt."""


class SDXLAdapter(VariancePreservingAdapter[SDXLBundle]):
    """Conditions: "text" with pooled vectors, and "negative_text" where guidance is on.

    An empty negative prompt is encoded like any other; with `ZERO_NEGATIVE_KEY` it is zeros, which the stock pipeline
    takes where it is given none (`force_zeros_for_empty_prompt`). The size that the U-Net is told is that of the image,
    uncropped.
    """

    used_params = frozenset({"guidance_scale"})
    used_sampler_kwargs = VariancePreservingAdapter.used_sampler_kwargs | {ZERO_NEGATIVE_KEY}
    default_sequence_length = 77
    longest_sequence = 77

    @property
    def geometry(self) -> Geometry:
        """(4, H / 8, W / 8) latents for the released checkpoints."""
        levels = len(self.bundle.vae.config["block_out_channels"])
        return Geometry(self.bundle.unet.config["in_channels"], 2 ** (levels - 1))

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError, too, for zeros with a negative prompt."""
        super().check_params(params)
        takes_zeros = params.sampler_kwargs.get(ZERO_NEGATIVE_KEY, False)
        if not isinstance(takes_zeros, bool):
            raise ConfigError(f"sampling.sampler_kwargs.{ZERO_NEGATIVE_KEY} = {takes_zeros!r} must be true or false.")
        if takes_zeros and params.negative_prompt:
            raise ConfigError(
                f"sampling.sampler_kwargs.{ZERO_NEGATIVE_KEY}: true replaces an empty negative prompt, and "
                f'sampling.negative_prompt = {params.negative_prompt!r}. Set it to "", or remove {ZERO_NEGATIVE_KEY}.'
            )

    def encode_texts(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """As the base's, with the zeros of `ZERO_NEGATIVE_KEY`."""
        conditions = super().encode_texts(primitives, params)
        if params.uses_guidance and params.sampler_kwargs.get(ZERO_NEGATIVE_KEY, False):
            text = require_condition(conditions, "text", TextEmbedCondition)
            pooled = None if text.pooled is None else torch.zeros_like(text.pooled)
            conditions[f"{NEGATIVE}text"] = text.replace(embeds=torch.zeros_like(text.embeds), pooled=pooled)
        return conditions

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
