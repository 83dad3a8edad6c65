"""MiniMax-H3: how the family answers the adapter's questions. A sample is a video and its sound.

Shape letters: see `unirl.models`; f latent frames, L tokens of a text, A channels of sound (stereo: 2), P steps of its
latents, M numbers of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.geometry import ChunkedGeometry
from unirl.models.diffusers_pipeline.normalisation import unstandardised
from unirl.models.diffusers_pipeline.video_sound import VideoWithSoundAdapter
from unirl.models.extras import from_extra
from unirl.models.guidance import refuse_guidance
from unirl.models.minimax_h3.bundle import MiniMaxH3Bundle
from unirl.models.minimax_h3.levels import sound_scale, sound_sigma, sound_velocity
from unirl.models.minimax_h3.rules import FPS, seconds_problem
from unirl.models.ragged_rows import in_groups
from unirl.sde.rows import over_rows
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

with from_extra("diffusers"):
    from diffusers.modular_pipelines.minimax_h3 import modular_pipeline as stock
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, patchify_video_latents

CONTEXT = 262_144
"""Tokens that Qwen3-VL was trained to read; the stock pipeline cuts no text, so max_sequence_length is refused."""
PIXEL_MOMENTS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of the pixels that the VAE works with (`MiniMaxH3ModularPipeline.pixel_mean`, `pixel_std`)."""


class MiniMaxH3Adapter(VideoWithSoundAdapter[MiniMaxH3Bundle]):
    """Conditions: "text" with a mask. The checkpoint is distilled, so there is no guidance.

    The sound has a schedule apart; its latents are scaled so that one noise level serves both, see
    `unirl.models.minimax_h3.levels`. The transformer takes text, sound and video as one sequence without padding, whose
    places follow from the length of the text, so rows of one length and one noise level run in one forward.
    """

    used_params = frozenset({"num_frames"})
    default_sequence_length = CONTEXT
    longest_sequence = CONTEXT
    fps = float(FPS)

    @property
    def geometry(self) -> ChunkedGeometry:
        """(24, 5 k + 2, H / 16, W / 16) latents of 17 k + 5 frames, in patches of 2, for the released checkpoints."""
        vae, config = self.bundle.vae, self.bundle.transformer.config
        return ChunkedGeometry(
            config["in_channels"],
            vae.spatial_compression_ratio,
            patch=config["patch_size"][-1],
            frame_factor=vae.config["clip_length"],
            chunk_latents=vae.tokens_chunk_size,
            tail_frames=vae.frame_overlap,
            tail_latents=vae.token_overlap,
        )

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError also for guidance, and for a length that the model was not trained on."""
        super().check_params(params)
        refuse_guidance(params, self.bundle.pretrained_model, "another model")
        problem = seconds_problem(params.num_frames, self.bundle.shortest_s, self.bundle.longest_s)
        if problem is not None:
            raise ConfigError(problem)

    def audio_shape(self, params: DiffusionSamplingParams) -> tuple[int, int, int]:
        steps = stock.audio_latent_num_frames(params.num_frames)
        return stock.MINIMAX_H3_AUDIO_CHANNELS, steps, self.bundle.audio_vae.config["latent_channels"]

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, C f h w + A P M]: a forward per length of texts and noise level."""
        text = require_condition(conditions, "text", TextEmbedCondition)
        c = self.bundle.shift_ratio
        video, audio = self.parts(x_R, params)
        k = over_rows(sound_scale(sigma_R, c), audio)
        unscaled = audio / k
        # No text is empty; a rehearsal, which reads zeros of a device, counts the longest.
        lengths = [length or text.embeds.shape[1] for length in text.mask.sum(dim=1).tolist()]

        def forward(rows: list[int]) -> Tensor:
            embeds = text.embeds[rows, : lengths[rows[0]]].to(x_R.device)
            sigma = sigma_R[rows[0]]
            parts = self._model_velocity(video[rows], unscaled[rows], embeds, sigma, sound_sigma(sigma, c))
            return torch.cat([part.float().flatten(1) for part in parts], dim=1)

        out = in_groups(list(zip(lengths, sigma_R.tolist(), strict=True)), forward, self.bundle.any_rank)
        v_video, v_audio = (out[:, own] for own in self.part_slices(params))
        scaled = sound_velocity(audio, v_audio.view_as(audio), k, c)
        return torch.cat([v_video, scaled.flatten(1)], dim=1)

    def _model_velocity(
        self, video: Tensor, audio: Tensor, embeds: Tensor, sigma: Tensor, audio_sigma: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Velocities of video [r, C, f, h, w] and sound [r, A, P, M] of one length of texts [r, L, D], at their levels.

        The transformer is fed 1 - sigma and points from noise to data.
        """
        transformer = self.bundle.transformer
        patch = tuple(transformer.config["patch_size"])
        num_rows, num_text = embeds.shape[:2]
        layout = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            text_token_tags=torch.full((num_text,), stock.MINIMAX_H3_TEXT_TAG),
            num_latent_frames=video.shape[2],
            latent_height=video.shape[3],
            latent_width=video.shape[4],
            num_audio_latents=audio.shape[2],
            patch_size=patch,
            audio_channels=stock.MINIMAX_H3_AUDIO_CHANNELS,
            audio_tag=stock.MINIMAX_H3_AUDIO_TAG,
            video_tag=stock.MINIMAX_H3_VIDEO_TAG,
        )
        positions, tags, video_places, audio_places, text_places = (each.to(video.device) for each in layout[:5])
        video_out, audio_out = transformer(
            hidden_states=patchify_video_latents(video, patch).unflatten(0, (num_rows, -1)),
            audio_hidden_states=audio.flatten(1, 2),
            encoder_hidden_states=embeds,
            timestep=1 - torch.stack([sigma, audio_sigma]),
            timestep_indices=(tags == stock.MINIMAX_H3_AUDIO_TAG).long(),
            token_tags=tags,
            position_ids=positions,
            video_indices=video_places,
            audio_indices=audio_places,
            text_indices=text_places,
            return_dict=False,
        )
        return -_unpatched(video_out, patch, video.shape), -audio_out.unflatten(1, audio.shape[1:3])

    # Decoding --------------------------------------------------------------------------------------------------------

    def _decoded_at_once(self, latents: Tensor) -> Tensor:
        """Pixels float32 of which the base makes those in [0, 1]."""
        dtype, device = self.bundle.vae_dtype, self.bundle.device
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            pixels = super()._decoded_at_once(latents)
        mean, std = (pixels.new_tensor(moment).view(1, -1, 1, 1, 1) for moment in PIXEL_MOMENTS)
        return (pixels * std + mean) * 2 - 1

    def to_vae(self, latents: Tensor) -> Tensor:
        """Video latents: channels with their mean and deviation back."""
        return unstandardised(latents, self.bundle.vae.config)

    def waveforms(self, latents: Tensor) -> Tensor:
        """Both channels; the VAE hears one, and takes them as two samples."""
        vae = self.bundle.audio_vae
        channels = (latents.to(self.bundle.device) / self.bundle.shift_ratio).flatten(0, 1).transpose(1, 2)
        waves = vae.decode(unstandardised(channels, vae.config), return_dict=False)[0]
        return waves[:, 0].float().unflatten(0, latents.shape[:2])

    @property
    def sample_rate(self) -> int:
        return self.bundle.audio_vae.config["sampling_rate"]


def _unpatched(rows: Tensor, patch: tuple[int, ...], shape: torch.Size) -> Tensor:
    """Latents [r, C, f, h, w] of `shape` of their patches [r, N, C pt ph pw]."""
    (pt, ph, pw), (num, channels, frames, height, width) = patch, shape
    grid = rows.reshape(num, frames // pt, height // ph, width // pw, channels, pt, ph, pw)
    return grid.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(shape)
