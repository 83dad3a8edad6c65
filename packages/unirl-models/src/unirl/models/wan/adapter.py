"""Wan: how the family answers the adapter's questions. Shape letters: see `unirl.models`; f latent frames."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, require_condition, select_rows
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.diffusers_pipeline.normalisation import standardised, unstandardised
from unirl.models.embedding_cache import content_key, tensor_digest
from unirl.models.experts import routed
from unirl.models.guidance import Guidance
from unirl.models.wan.bundle import WanBundle
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Modality, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

WanBundleT = TypeVar("WanBundleT", bound=WanBundle)


class WanAdapter(TextConditionedAdapter[WanBundleT], Generic[WanBundleT]):
    """Conditions: "text" with a mask, and "negative_text" where guidance is on. Latents are [16, f, h, w].

    Of two experts, `transformer` takes the rows at and above the boundary and `transformer_2` the others, each with its
    own guidance scale.
    """

    modality = Modality.VIDEO
    used_params = TextConditionedAdapter.used_params | {"num_frames", "guidance_scale_2"}
    default_sequence_length = 512
    longest_sequence = 512

    # Any: the keywords of TextConditionedAdapter.
    def __init__(self, bundle: WanBundleT, **options: Any) -> None:
        super().__init__(bundle, **options)
        self.fps = 24.0 if bundle.masks_timesteps else 16.0

    @property
    def geometry(self) -> Geometry:
        """(16, (F - 1) / 4 + 1, H / 8, W / 8) latents in patches of 1 x 2 x 2 for the released checkpoints."""
        transformer, vae = self.bundle.transformer.config, self.bundle.vae.config
        frame_patch, patch, _ = transformer["patch_size"]
        return Geometry(
            vae["z_dim"], vae["scale_factor_spatial"], patch, vae["scale_factor_temporal"], frame_patch=frame_patch
        )

    def num_references(self, params: DiffusionSamplingParams) -> int:
        """N: latent frames of reference images before those of the video, sampled with it and cut off."""
        del params
        return 0

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C, N + f, h, w)."""
        channels, frames, *area = super().latent_shape(params)
        return channels, self.num_references(params) + frames, *area

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        """Tokens of one sample, its reference images included."""
        _, frames, height, width = self.latent_shape(params)
        return frames * (height // self.geometry.patch) * (width // self.geometry.patch)

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images | Videos:
        """The video without its reference images."""
        return super().decode(latents[:, :, self.num_references(params) :], params)

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError for a second scale that nothing reads, too."""
        super().check_params(params)
        if params.guidance_scale_2 is None:
            return
        if self.bundle.boundary is None:
            raise ConfigError(
                f"guidance_scale_2 = {params.guidance_scale_2} is for a second expert; "
                f"{self.bundle.pretrained_model} has one transformer. Set sampling.guidance_scale_2: null."
            )
        if not params.uses_guidance and params.guidance_scale_2 > 1:
            raise ConfigError(
                f"guidance_scale_2 = {params.guidance_scale_2} guides nothing: guidance_scale = "
                f"{params.guidance_scale} alone switches guidance on. Raise it above 1 or set guidance_scale_2: null."
            )

    def guidance(self, params: DiffusionSamplingParams) -> Guidance:
        """With the second scale below the boundary."""
        guidance = super().guidance(params)
        if self.bundle.boundary is None or params.guidance_scale_2 is None:
            return guidance
        return replace(guidance, boundary=self.bundle.boundary, scale_below=params.guidance_scale_2)

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C, f, h, w], of the expert of each row's noise level where there are two."""
        boundary = self.bundle.boundary
        if boundary is None:
            return self.predict_by("transformer", x_R, sigma_R, conditions, params)

        def expert(name: str, rows: list[int], x: Tensor, sigma: Tensor, step: Tensor) -> Tensor:
            del step
            own = conditions if len(rows) == len(x_R) else select_rows(conditions, rows)
            return self.predict_by(name, x, sigma, own, params)

        velocity = routed(
            [partial(expert, "transformer"), partial(expert, "transformer_2")],
            lambda sigma_R: (sigma_R < boundary).long(),
            self.bundle.any_rank,
        )
        return velocity(x_R, sigma_R, sigma_R)  # neither expert asks for the step

    def predict_by(
        self, name: str, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams
    ) -> Tensor:
        """Velocity [R, C, f, h, w] of one transformer."""
        transformer = self.bundle.modules[name]
        # Not the first weight: scales and time embedding stay float32 in a checkpoint that is loaded in bfloat16.
        dtype = transformer.patch_embedding.weight.dtype
        inputs = {
            "hidden_states": x_R,
            "encoder_hidden_states": self.padded_text(conditions, params),
            **self.inputs_beside_text(x_R, conditions),
        }
        return transformer(
            **{name: value.to(x_R.device, dtype) for name, value in inputs.items()},
            **self.transformer_options(params),
            timestep=self.timesteps(x_R, sigma_R),
            return_dict=False,
        )[0]

    def inputs_beside_text(self, x_R: Tensor, conditions: Conditions) -> dict[str, Tensor]:
        """Inputs of the transformer by name; "hidden_states" here is read instead of the latents alone."""
        del x_R, conditions
        return {}

    def transformer_options(self, params: DiffusionSamplingParams) -> dict[str, Tensor | int]:
        """Inputs of the transformer that rows share."""
        del params
        return {}

    def timesteps(self, x_R: Tensor, sigma_R: Tensor) -> Tensor:
        """1000 sigma in float, [R], or [R, L] where tokens differ."""
        del x_R
        return sigma_R * TIMESTEPS_PER_SIGMA

    def padded_text(self, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """[R, L, D] of the full length: the model attends to the zeros after a text too."""
        text = require_condition(conditions, "text", TextEmbedCondition)
        missing = self.sequence_length(params) - text.embeds.shape[1]
        return torch.nn.functional.pad(text.embeds, (0, 0, 0, missing))

    def to_vae(self, latents: Tensor) -> Tensor:
        """Channels with their mean and deviation back."""
        return unstandardised(latents.to(self.bundle.vae.dtype), self.bundle.vae.config)

    def from_vae(self, latents: Tensor) -> Tensor:
        """Standardised channels."""
        return standardised(latents, self.bundle.vae.config)

    def media_key(
        self,
        what: str,
        params: DiffusionSamplingParams | None,
        *media: Tensor | None,
        fingerprint: str | None = None,
    ) -> str:
        """Names what a sample's conditions depend on. params: None for media that are not resized to the sampled size.
        fingerprint: of what encodes them, None is the VAE's."""
        size = None if params is None else f"{params.num_frames} x {params.height} x {params.width}"
        digests = [None if each is None else tensor_digest(each) for each in media]
        return content_key(self.bundle.family.lower(), what, fingerprint or self._vae_fingerprint, size, *digests)
