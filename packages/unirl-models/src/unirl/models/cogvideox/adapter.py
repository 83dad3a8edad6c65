"""CogVideoX: how the family answers the adapter's questions. Shape letters: see `unirl.models`; f latent frames."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.cogvideox.bundle import CogVideoXBundle
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.diffusers_pipeline.variance_preserving import VariancePreservingAdapter
from unirl.models.extras import from_extra
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Modality, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

with from_extra("diffusers"):
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid


class CogVideoXAdapter(VariancePreservingAdapter[CogVideoXBundle]):
    """Conditions: "text", and "negative_text" where guidance is on. Videos of 8 k + 1 frames at 8 frames per second.

    CogVideoX 1.5 (16 per second) joins two latent frames in a token. As in its stock pipeline and in its training, one
    latent frame more is sampled before the others: decoding leaves it out, encoding repeats the first.
    """

    modality = Modality.VIDEO
    used_params = frozenset({"guidance_scale", "num_frames"})
    default_sequence_length = 226
    longest_sequence = 226

    # Any: the keywords of TextConditionedAdapter.
    def __init__(self, bundle: CogVideoXBundle, **options: Any) -> None:
        super().__init__(bundle, **options)
        self.fps = 8.0 if bundle.transformer.config["patch_size_t"] is None else 16.0

    @property
    def geometry(self) -> Geometry:
        """(16, (F - 1) / 4 + 1, H / 8, W / 8) latents in patches of 2 x 2 for the released checkpoints, 1.5's frames
        without the one more."""
        config, vae = self.bundle.transformer.config, self.bundle.vae.config
        return Geometry(
            config["in_channels"],
            2 ** (len(vae["block_out_channels"]) - 1),
            config["patch_size"],
            frame_factor=int(vae["temporal_compression_ratio"]),
        )

    @property
    def _num_dropped(self) -> int:
        """Latent frames that are sampled and not decoded: what an odd number lacks to whole tokens."""
        return (self.bundle.transformer.config["patch_size_t"] or 1) - 1

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C, f, h, w). Raises ConfigError for an even number of latent frames, which decode to other frames."""
        channels, frames, *area = super().latent_shape(params)
        if frames % 2 == 0:
            step = 2 * int(self.bundle.vae.config["temporal_compression_ratio"])
            below = (params.num_frames - 1) // step * step + 1
            raise ConfigError(
                f"num_frames = {params.num_frames} is not {step} k + 1: the VAE decodes latent frames in pairs after "
                f"the first. Use num_frames = {below} or {below + step}."
            )
        return channels, frames + self._num_dropped, *area

    def image_seq_len(self, params: DiffusionSamplingParams) -> int:
        _, frames, height, width = self.latent_shape(params)
        config = self.bundle.transformer.config
        return (
            frames // (config["patch_size_t"] or 1) * (height // config["patch_size"]) * (width // config["patch_size"])
        )

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images | Videos:
        return super().decode(latents[:, :, self._num_dropped :], params)

    def encode_media(self, media: Images | Videos) -> Tensor:
        latents = super().encode_media(media)
        return torch.cat([latents[:, :, : self._num_dropped], latents], dim=2)

    def sequence_length(self, params: DiffusionSamplingParams) -> int:
        """As many tokens as the transformer's positions are made for, 226 of the released checkpoints."""
        del params
        return self.bundle.transformer.config["max_text_seq_length"]

    def model_output(
        self, z_R: Tensor, timestep_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams
    ) -> Tensor:
        """What the transformer predicts, [R, C, f, h, w]; it has frames before channels."""
        del params
        text = require_condition(conditions, "text", TextEmbedCondition)
        transformer = self.bundle.transformer
        dtype = next(transformer.parameters()).dtype
        return transformer(
            hidden_states=z_R.transpose(1, 2).to(dtype),
            encoder_hidden_states=text.embeds.to(z_R.device, dtype),
            timestep=timestep_R,
            image_rotary_emb=self._rotary(z_R),
            return_dict=False,
        )[0].transpose(1, 2)

    def _rotary(self, z_R: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of the positions of a video of this shape; None for the 2B model, which adds positions."""
        config = self.bundle.transformer.config
        if not config["use_rotary_positional_embeddings"]:
            return None
        patch, frame_patch = config["patch_size"], config["patch_size_t"]
        frames, *area = z_R.shape[2:]
        grid = (area[0] // patch, area[1] // patch)
        trained = (config["sample_height"] // patch, config["sample_width"] // patch)
        if frame_patch is None:
            tokens, kind = frames, "linspace"
            crop = get_resize_crop_region_for_grid(grid, trained[1], trained[0])
        else:
            tokens, kind, crop = frames // frame_patch, "slice", None
        cos, sin = get_3d_rotary_pos_embed(
            config["attention_head_dim"], crop, grid, tokens, grid_type=kind, max_size=trained, device=z_R.device
        )
        return cos, sin
