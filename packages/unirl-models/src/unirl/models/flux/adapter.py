"""FLUX.1: how the family answers the adapter's questions. Shape letters: see `unirl.models`."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.flux.bundle import FluxBundle
from unirl.models.guidance import check_distilled_guidance, refuse_guidance
from unirl.models.patches import packed_2x2, places, unpacked_2x2
from unirl.types.conditions import TextEmbedCondition
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

FluxBundleT = TypeVar("FluxBundleT", bound=FluxBundle)


class FluxTextAdapter(TextConditionedAdapter[FluxBundleT], Generic[FluxBundleT]):
    """What every task of FLUX.1 shares. Conditions: "text" with pooled vectors, "negative_text" where guidance is on.

    dev, Kontext and Fill take their guidance as an input, `distilled_guidance_scale`; `guidance_scale` above 1 is
    classifier-free guidance on top, the `true_cfg_scale` of the stock pipeline. schnell takes neither.
    """

    used_params = frozenset({"guidance_scale", "distilled_guidance_scale", "max_sequence_length"})
    default_sequence_length = 512
    longest_sequence = 512

    @property
    def geometry(self) -> Geometry:
        """(16, H / 8, W / 8) latents in patches of 2 for the released checkpoints."""
        vae = self.bundle.vae.config
        return Geometry(vae["latent_channels"], 2 ** (len(vae["block_out_channels"]) - 1), patch=2)

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError also for guidance that the checkpoint does not take, and for the lack of one it needs."""
        super().check_params(params)
        distilled = self.bundle.is_distilled
        released = self.bundle.released_guidance
        check_distilled_guidance(params, self.bundle.family, takes=not distilled, released=released)
        if distilled:
            refuse_guidance(params, self.bundle.pretrained_model, "FLUX.1-dev")

    def forward(
        self,
        x_R: Tensor,
        sigma_R: Tensor,
        text: TextEmbedCondition,
        params: DiffusionSamplingParams,
        *,
        beside: Tensor | None = None,
        behind: Tensor | None = None,
        behind_places: Tensor | None = None,
    ) -> Tensor:
        """Velocity [R, C, h, w] of the transformer, fed sigma.

        beside: [R, L, D'] further channels of the latent tokens. behind: [R, L', D] tokens after them, with their
        places [L', 3].
        """
        transformer, device = self.bundle.transformer, x_R.device
        dtype = next(transformer.parameters()).dtype
        height, width = x_R.shape[-2:]
        tokens, img_ids = packed_2x2(x_R), places(1, height // 2, width // 2, device=device)
        num_tokens = tokens.shape[1]
        if beside is not None:
            tokens = torch.cat([tokens, beside.to(tokens)], dim=2)
        if behind is not None and behind_places is not None:
            tokens, img_ids = torch.cat([tokens, behind.to(tokens)], dim=1), torch.cat([img_ids, behind_places])
        scale = params.distilled_guidance_scale
        out = transformer(
            hidden_states=tokens.to(dtype),
            timestep=sigma_R,
            guidance=None if scale is None else x_R.new_full((len(x_R),), scale),
            pooled_projections=None if text.pooled is None else text.pooled.to(device, dtype),
            encoder_hidden_states=text.embeds.to(device, dtype),
            txt_ids=torch.zeros(text.embeds.shape[1], 3, device=device),
            img_ids=img_ids,
            return_dict=False,
        )[0]
        return unpacked_2x2(out[:, :num_tokens], height, width)


class FluxAdapter(FluxTextAdapter[FluxBundle]):
    """FLUX.1 dev and schnell."""

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        return self.forward(x_R, sigma_R, require_condition(conditions, "text", TextEmbedCondition), params)
