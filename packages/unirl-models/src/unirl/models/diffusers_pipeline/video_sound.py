"""Families whose sample is a video with its sound, in one latent.

Shape letters: see `unirl.models`; f latent frames, A P M of a latent of sound: its channels, steps and what a step has.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.types.errors import ConfigError
from unirl.types.media import Audios, Images, Modality, Videos
from unirl.types.sampling import DiffusionSamplingParams

BundleT = TypeVar("BundleT", bound=DiffusersBundle)


class VideoWithSoundAdapter(TextConditionedAdapter[BundleT]):
    """A latent is one row of numbers, the video's [C, f, h, w] and then the sound's [A, P, M]: one trajectory, one
    log-probability over both.

    A family says the shape of its sound, `audio_shape`, and how it is heard, `waveforms`.
    """

    modality = Modality.VIDEO

    @abstractmethod
    def audio_shape(self, params: DiffusionSamplingParams) -> tuple[int, int, int]:
        """(A, P, M) of one sample: as long as its video."""

    @abstractmethod
    def waveforms(self, latents: Tensor) -> Tensor:
        """[B, channels, L] float32 in [-1, 1] of latents [B, A, P, M] of sound."""

    @property
    @abstractmethod
    def sample_rate(self) -> int:
        """Numbers per second of a channel of `waveforms`."""

    def video_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C, f, h, w) of one sample."""
        return super().latent_shape(params)

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C f h w + A P M,)."""
        return (math.prod(self.video_shape(params)) + math.prod(self.audio_shape(params)),)

    def part_slices(self, params: DiffusionSamplingParams) -> tuple[slice, slice]:
        """Where video and sound lie along dimension 1 of latents."""
        [whole], video = self.latent_shape(params), math.prod(self.video_shape(params))
        return slice(0, video), slice(video, whole)

    def parts(self, latents: Tensor, params: DiffusionSamplingParams) -> tuple[Tensor, Tensor]:
        """Latents [B, ...] as those of video [B, C, f, h, w] and of sound [B, A, P, M]."""
        video, audio = (latents[:, own] for own in self.part_slices(params))
        return video.unflatten(1, self.video_shape(params)), audio.unflatten(1, self.audio_shape(params))

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images | Videos:
        """Videos that bring their sound: waveforms [L, channels]."""
        video, audio = self.parts(latents, params)
        videos = super().decode(video, params)
        waves = torch.cat([self.waveforms(part) for part in audio.split(self.decode_batch_size)])
        sound = Audios.pack(waveform=list(waves.transpose(1, 2)), sample_rate=self.sample_rate)
        return videos.replace(audio=sound)

    def encode_media(self, media: Images | Videos) -> Tensor:
        """Raises ConfigError: the published folder has no way from sound to its latents."""
        raise ConfigError(f"{self.bundle.family} cannot encode videos with sound. Train it on its own samples.")


class VideoWithSoundPipeline(DiffusersPipeline):
    """A pipeline whose latents have two media, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`."""

    latent_media: ClassVar[tuple[str, ...]] = ("video", "audio")

    def media_slices(self, params: DiffusionSamplingParams) -> dict[str, slice]:
        """Where each of `latent_media` lies along dimension 1 of latents."""
        # What adapter_class makes; Any: of the family's own bundle.
        adapter = cast(VideoWithSoundAdapter[Any], self.adapter)
        return dict(zip(self.latent_media, adapter.part_slices(params), strict=True))
