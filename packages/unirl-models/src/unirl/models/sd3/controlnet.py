"""Stable Diffusion 3 with a ControlNet: an image besides the text that says where things are.

The transformer trains, the ControlNet is frozen. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, require_condition
from unirl.models.diffusers_pipeline.components import frozen
from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.diffusers_pipeline.references import pictures_of, resized
from unirl.models.extras import from_extra
from unirl.models.guidance import INTERVAL_KEY
from unirl.models.sd3.adapter import SD3Adapter
from unirl.models.sd3.bundle import SD3Bundle
from unirl.types.conditions import Condition, ImageLatentCondition, TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

with from_extra("diffusers"):
    from diffusers.models.controlnets.controlnet_sd3 import SD3ControlNetModel

CONTROL = "control"
"""Slot of the condition."""
SCALE_KEY = "controlnet_conditioning_scale"


class SD3ControlNetBundle(SD3Bundle):
    """A folder of StableDiffusion3ControlNetPipeline with one ControlNet."""

    family = "SD3 ControlNet"
    pipeline_classes = ("StableDiffusion3ControlNetPipeline",)
    components = {**SD3Bundle.components, "controlnet": frozen(SD3ControlNetModel)}
    reads_media = True
    needs_media = True
    most_images = 1

    def after_loading(self) -> None:
        """Raises ConfigError for a ControlNet that takes more than the image's latents."""
        channels = self.modules["controlnet"].config["extra_conditioning_channels"]
        if channels:
            raise ConfigError(
                f"the ControlNet of {self.pretrained_model} takes {channels} channels next to the image's latents, as "
                "those for inpainting do. Use one with extra_conditioning_channels: 0."
            )


class SD3ControlNetAdapter(SD3Adapter):
    """Conditions: those of `SD3Adapter`, and "control": the latents of an image per sample, resized to the size that is
    sampled.

    sampler_kwargs controlnet_conditioning_scale: what the ControlNet's output is multiplied by, 1 by default. It acts
    on every step.
    """

    used_sampler_kwargs = frozenset({INTERVAL_KEY, SCALE_KEY})
    read_slots = frozenset({"text", "image"})

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """Raises ConfigError for a sample without an image or with several."""
        samples = pictures_of(primitives, self.bundle.family, fewest=1, most=1) or []
        latents = torch.stack(self.image_latents([resized(each, params.height, params.width) for (each,) in samples]))
        if self._is_unpooled:
            # Such a ControlNet was trained on latents that were scaled, but not shifted.
            config = self.bundle.vae.config
            latents = latents + (config["shift_factor"] or 0.0) * config["scaling_factor"]
        return {CONTROL: ImageLatentCondition(latents=latents)}

    def control(
        self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams
    ) -> list[Tensor]:
        """The ControlNet's residuals, one per block of the ControlNet."""
        text = require_condition(conditions, "text", TextEmbedCondition)
        image = require_condition(conditions, CONTROL, ImageLatentCondition)
        controlnet, device = self._controlnet, x_R.device
        dtype = next(controlnet.parameters()).dtype
        pooled = None if text.pooled is None else text.pooled.to(device, dtype)
        if self._is_unpooled and pooled is not None:
            pooled = torch.zeros_like(pooled)
        reads_text = controlnet.config["joint_attention_dim"] is not None
        return controlnet(
            hidden_states=x_R.to(dtype),
            timestep=sigma_R * TIMESTEPS_PER_SIGMA,
            encoder_hidden_states=text.embeds.to(device, dtype) if reads_text else None,
            pooled_projections=pooled,
            controlnet_cond=image.latents.to(device, dtype),
            conditioning_scale=float(params.sampler_kwargs.get(SCALE_KEY, 1.0)),
            return_dict=False,
        )[0]

    @property
    def _controlnet(self) -> Any:  # Any: as in `DiffusersBundle.load`
        return self.bundle.modules["controlnet"]

    @property
    def _is_unpooled(self) -> bool:
        """True if the ControlNet sees zeros for the pooled text (InstantX)."""
        return bool(self._controlnet.config["force_zeros_for_pooled_projection"])


class SD3ControlNetPipeline(DiffusersPipeline):
    """SD3 with a ControlNet, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    adapter_class = SD3ControlNetAdapter
