"""LTX-2: how the family answers the adapter's questions. A sample is a video and its sound.

Shape letters: see `unirl.models`; f latent frames, A audio channels, P audio steps, M mel bins of a latent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, num_rows, require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.ltx2.bundle import LTX2Bundle
from unirl.models.ltx2.regions import RegionMaps
from unirl.sde.loop import Velocity
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Audios, Images, Modality, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

FRAMES_PER_SECOND = 24.0


class LTX2Adapter(TextConditionedAdapter[LTX2Bundle]):
    """Conditions: "text", and "negative_text" where guidance is on.

    A latent is one row of numbers, the video's [C, f, h, w] and then the audio's [A, P, M]: one trajectory, one
    log-probability over both, and each stream sees the other at the same noise level. Guidance is classifier-free with
    one scale for both; the stock pipeline's spatio-temporal and modality guidance (more forwards) and its rescaling are
    not used.
    """

    modality = Modality.VIDEO
    used_params = TextConditionedAdapter.used_params | {"num_frames"}
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

    def video_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C, f, h, w) of one sample."""
        return super().latent_shape(params)

    def audio_shape(self, params: DiffusionSamplingParams) -> tuple[int, int, int]:
        """(A, P, M) of one sample: as long as its video."""
        vae = self.bundle.audio_vae
        config = vae.config
        per_second = config["sample_rate"] / config["mel_hop_length"] / vae.temporal_compression_ratio
        steps = round(params.num_frames / FRAMES_PER_SECOND * per_second)
        return config["latent_channels"], steps, config["mel_bins"] // vae.mel_compression_ratio

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C f h w + A P M,)."""
        return (math.prod(self.video_shape(params)) + math.prod(self.audio_shape(params)),)

    def part_slices(self, params: DiffusionSamplingParams) -> tuple[slice, slice]:
        """Where video and audio lie along dimension 1 of latents."""
        [whole], video = self.latent_shape(params), math.prod(self.video_shape(params))
        return slice(0, video), slice(video, whole)

    def parts(self, latents: Tensor, params: DiffusionSamplingParams) -> tuple[Tensor, Tensor]:
        """Latents [B, ...] as those of video [B, C, f, h, w] and of audio [B, A, P, M]."""
        video, audio = (latents[:, own] for own in self.part_slices(params))
        return video.unflatten(1, self.video_shape(params)), audio.unflatten(1, self.audio_shape(params))

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

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images | Videos:
        """Videos that bring their sound: waveforms [L, channels] of both channels."""
        video, audio = self.parts(latents, params)
        videos = super().decode(video, params)
        vocoder = self.bundle.vocoder
        spectrograms = [
            self.bundle.audio_vae.decode(self.to_audio_vae(part), return_dict=False)[0]
            for part in audio.split(self.decode_batch_size)
        ]
        waves = torch.cat([vocoder(part.to(vocoder.dtype)).float() for part in spectrograms]).clamp(-1, 1)
        rate = vocoder.config["output_sampling_rate"]
        return videos.replace(audio=Audios.pack(waveform=list(waves.transpose(1, 2)), sample_rate=rate))

    def encode_media(self, media: Images | Videos) -> Tensor:
        """Raises ConfigError: the published folder has no way from sound to a spectrogram."""
        raise ConfigError(f"{self.bundle.family} cannot encode videos with sound. Train it on its own samples.")

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
