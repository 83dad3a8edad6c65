"""LTX-2: how the family answers the adapter's questions. A sample is a video and its sound.

Shape letters: see `unirl.models`; f latent frames, A audio channels, P audio steps, M mel bins of a latent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, num_rows, require_condition
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.diffusers_pipeline.video_sound import VideoWithSoundAdapter
from unirl.models.ltx2.bundle import LTX2Bundle
from unirl.models.ltx2.regions import RegionMaps
from unirl.sde.loop import Velocity
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

FRAMES_PER_SECOND = 24.0


class LTX2Adapter(VideoWithSoundAdapter[LTX2Bundle]):
    """Conditions: "text", and "negative_text" where guidance is on.

    Each stream sees the other at the same noise level. Guidance is classifier-free with one scale for both; the stock
    pipeline's spatio-temporal and modality guidance (more forwards) and its rescaling are not used.
    """

    used_params = VideoWithSoundAdapter.used_params | {"num_frames"}
    default_sequence_length = 1024
    longest_sequence = 1024
    fps = FRAMES_PER_SECOND
    regions: RegionMaps | None = None
    """What notes the sound's attention to the video; None where nothing does."""

    @property
    def geometry(self) -> Geometry:
        """The video: (128, (F - 1) / 8 + 1, H / 32, W / 32) latents in patches of 1 for the released checkpoints."""
        vae = self.bundle.vae
        return Geometry(
            self.bundle.transformer.config["in_channels"],
            vae.spatial_compression_ratio,
            frame_factor=vae.temporal_compression_ratio,
        )

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError also for a length that the connectors' registers do not divide."""
        super().check_params(params)
        config = self.bundle.connectors_config
        for name in ("video_connector_num_learnable_registers", "audio_connector_num_learnable_registers"):
            length, registers = self.sequence_length(params), config.get(name)
            if registers and length % registers:
                raise ConfigError(
                    f"max_sequence_length = {length} is not a multiple of the {registers} registers of {name}. Use "
                    f"{math.ceil(length / registers) * registers}."
                )

    def audio_shape(self, params: DiffusionSamplingParams) -> tuple[int, int, int]:
        """(A, P, M) of one sample: as long as its video."""
        vae = self.bundle.audio_vae
        config = vae.config
        per_second = config["sample_rate"] / config["mel_hop_length"] / vae.temporal_compression_ratio
        steps = round(params.num_frames / FRAMES_PER_SECOND * per_second)
        return config["latent_channels"], steps, config["mel_bins"] // vae.mel_compression_ratio

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """As every family, and watched by `regions`."""
        velocity = super().bind(conditions, params)
        return velocity if self.regions is None else self.regions.watched(velocity, num_rows(conditions))

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C f h w + A P M] of the transformer, fed 1000 sigma."""
        text = require_condition(conditions, "text", TextEmbedCondition)
        transformer = self.bundle.transformer
        dtype = transformer.proj_in.weight.dtype
        video, audio = self.parts(x_R, params)
        frames, height, width = video.shape[2:]
        config = self.bundle.connectors_config
        video_width = config["video_connector_num_attention_heads"] * config["video_connector_attention_head_dim"]
        embeds = text.embeds.to(x_R.device, dtype)
        mask = text.mask.to(x_R.device)
        timestep_R = sigma_R * TIMESTEPS_PER_SIGMA
        video_tokens, audio_tokens = transformer(
            hidden_states=video.flatten(2).transpose(1, 2).to(dtype),
            audio_hidden_states=audio.transpose(1, 2).flatten(2).to(dtype),
            encoder_hidden_states=embeds[..., :video_width],
            audio_encoder_hidden_states=embeds[..., video_width:],
            timestep=timestep_R,
            sigma=timestep_R,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            num_frames=frames,
            height=height,
            width=width,
            fps=FRAMES_PER_SECOND,
            audio_num_frames=audio.shape[2],
            use_cross_timestep=True,
            return_dict=False,
        )
        audio_out = audio_tokens.unflatten(2, (audio.shape[1], -1)).transpose(1, 2)
        return torch.cat([video_tokens.transpose(1, 2).flatten(1), audio_out.flatten(1)], dim=1)

    def waveforms(self, latents: Tensor) -> Tensor:
        """Both channels, by the vocoder, from the spectrograms that the audio VAE decodes."""
        vocoder = self.bundle.vocoder
        spectrograms = self.bundle.audio_vae.decode(self.to_audio_vae(latents), return_dict=False)[0]
        return vocoder(spectrograms.to(vocoder.dtype)).float().clamp(-1, 1)

    @property
    def sample_rate(self) -> int:
        return self.bundle.vocoder.config["output_sampling_rate"]

    def to_vae(self, latents: Tensor) -> Tensor:
        """Video latents: channels with their mean and deviation back."""
        vae = self.bundle.vae
        mean, std = (moment.view(1, -1, 1, 1, 1).to(latents) for moment in (vae.latents_mean, vae.latents_std))
        return (latents * std / vae.config["scaling_factor"] + mean).to(vae.dtype)

    def from_vae(self, latents: Tensor) -> Tensor:
        vae = self.bundle.vae
        mean, std = (moment.view(1, -1, 1, 1, 1).to(latents) for moment in (vae.latents_mean, vae.latents_std))
        return (latents - mean) * vae.config["scaling_factor"] / std

    def to_audio_vae(self, latents: Tensor) -> Tensor:
        """Audio latents [B, A, P, M]: every channel and bin with its mean and deviation back."""
        vae = self.bundle.audio_vae
        shape = (1, latents.shape[1], 1, latents.shape[3])
        mean, std = (moment.view(shape).to(latents) for moment in (vae.latents_mean, vae.latents_std))
        return (latents * std + mean).to(vae.dtype)
