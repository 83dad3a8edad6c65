"""The autoencoders and the vocoder of the sounds world, and how they are taught.

Shape letters: B samples, C F H W latent of a video, A P M of a sound, T frames, L samples of a waveform.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from torch import Tensor, nn

from unirl.pretraining.autoencoding import signed
from unirl.pretraining.fit import fit
from unirl.reward.worlds.moves_grammar import MovingObject
from unirl.worlds.sounds import world
from unirl.worlds.sounds.spectrogram import MEL_BINS, spectrogram

LATENT_CHANNELS = 32
AUDIO_CHANNELS = 4
AUDIO_LATENT = AUDIO_CHANNELS * MEL_BINS // 4
"""Numbers of a latent step of a sound."""
SPATIAL, TEMPORAL = 16, 8
"""Compression of videos: a latent is a quarter of the first frame, or of the eight that follow."""
KL_WEIGHT = 3e-5


def make_video_autoencoder() -> AutoencoderKLLTX2Video:
    """Videos [3, 9, 32, 32] to latents [32, 2, 2, 2].

    Space goes by patches of 4 x 4 pixels, as in the released model, and two convolutions: at full resolution they
    would cost a CPU more than the transformer.
    """
    return AutoencoderKLLTX2Video(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(64, 64, 64),
        down_block_types=("LTX2VideoDownBlock3D",) * 3,
        decoder_block_out_channels=(32, 32, 64),
        layers_per_block=(0, 1, 0, 0),
        decoder_layers_per_block=(1, 1, 1, 0),
        spatio_temporal_scaling=(True, True, True),
        downsample_type=("spatiotemporal", "spatiotemporal", "temporal"),
        upsample_type=("temporal", "spatiotemporal", "spatiotemporal"),
        upsample_factor=(1, 1, 1),
        patch_size=4,
        spatial_compression_ratio=SPATIAL,
        temporal_compression_ratio=TEMPORAL,
    )


def make_audio_autoencoder() -> AutoencoderKLLTX2Audio:
    """Spectrograms [1, 21, 16] to latents [4, 6, 4]. Its moments are one number per channel and bin of a latent."""
    return AutoencoderKLLTX2Audio(
        base_channels=AUDIO_LATENT,
        ch_mult=(1, 2, 2),
        num_res_blocks=1,
        in_channels=1,
        output_channels=1,
        latent_channels=AUDIO_CHANNELS,
        mel_bins=MEL_BINS,
        sample_rate=world.RATE,
        mel_hop_length=world.HOP,
    )


def make_vocoder() -> LTX2Vocoder:
    """Spectrograms [1, 21, 16] to waveforms of one channel, 128 samples per column."""
    return LTX2Vocoder(
        in_channels=MEL_BINS,
        hidden_channels=64,
        out_channels=1,
        upsample_factors=[16, 8],
        upsample_kernel_sizes=[32, 16],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1]],
        output_sampling_rate=world.RATE,
    )


def train_video_autoencoder(
    vae: AutoencoderKLLTX2Video, rng: np.random.Generator, *, num_steps: int, num_videos: int, batch_size: int = 16
) -> None:
    """Train on drawings of all objects, then set mean and deviation of the latents by channel."""
    objects = world.all_objects()
    drawings = draw_videos([objects[index % len(objects)] for index in range(num_videos)], rng)
    # Videos must show in the latents before the prior can blur them: a deviation of e^-2 to begin with.
    bias = vae.encoder.conv_out.conv.bias
    assert bias is not None  # noqa: S101 - the class has one
    nn.init.constant_(bias[LATENT_CHANNELS:], -4.0)
    _train(vae, lambda: as_video_input(drawings[torch.randint(len(drawings), (batch_size,))]), num_steps=num_steps)
    with torch.no_grad():
        latents = vae.encode(as_video_input(draw_videos(objects * 4, rng))).latent_dist.sample()
    vae.latents_mean.copy_(latents.mean((0, 2, 3, 4)))
    vae.latents_std.copy_(latents.std((0, 2, 3, 4)))


def train_audio_autoencoder(
    vae: AutoencoderKLLTX2Audio, rng: np.random.Generator, *, num_steps: int, num_sounds: int, batch_size: int = 32
) -> None:
    """Train on spectrograms of all sounds, then set mean and deviation of the latents by channel and bin."""
    sounds = world.all_sounds()
    columns = spectrogram(draw_sounds([sounds[index % len(sounds)] for index in range(num_sounds)], rng))
    _train(vae, lambda: columns[torch.randint(len(columns), (batch_size,))], num_steps=num_steps)
    with torch.no_grad():
        tones: list[world.Sound] = [sound for sound in sounds if sound[0] == sound[1] and sound[0] is not None]
        latents_BAPM = vae.encode(spectrogram(draw_sounds(tones * 60, rng))).latent_dist.sample()
    vae.latents_mean.copy_(latents_BAPM.mean((0, 2)).flatten())
    vae.latents_std.copy_(latents_BAPM.std((0, 2)).flatten())


def train_vocoder(
    vocoder: LTX2Vocoder,
    vae: AutoencoderKLLTX2Audio,
    rng: np.random.Generator,
    *,
    num_steps: int,
    num_sounds: int,
    batch_size: int = 32,
) -> None:
    """Train on the squared error of the waveform, from spectrograms as the autoencoder gives them back."""
    sounds = world.all_sounds()
    waves_BL = draw_sounds([sounds[index % len(sounds)] for index in range(num_sounds)], rng)
    with torch.no_grad():
        columns = vae.decode(vae.encode(spectrogram(waves_BL)).latent_dist.sample()).sample

    def batch_loss() -> Tensor:
        rows = torch.randint(num_sounds, (batch_size,))
        return nn.functional.mse_loss(vocoder(columns[rows])[:, 0], waves_BL[rows])

    fit(
        vocoder,
        batch_loss,
        num_steps=num_steps,
        muon_rate=0.02,
        adam_rate=4e-3,
        decay=0.6,
        is_hidden=lambda name: "resnets" in name,
    )


def draw_videos(objects: list[MovingObject], rng: np.random.Generator) -> Tensor:
    """A drawing of each object, uint8 [B, T, 3, 32, 32]."""
    return torch.from_numpy(np.stack([world.render_video(each, rng) for each in objects]))


def draw_sounds(sounds: list[world.Sound], rng: np.random.Generator) -> Tensor:
    """A waveform of each sound, [B, L]."""
    return torch.from_numpy(np.stack([world.render_sound(sound, rng) for sound in sounds]))


def as_video_input(videos_BTCHW: Tensor) -> Tensor:
    """uint8 videos as the autoencoder takes them."""
    return signed(videos_BTCHW).transpose(1, 2)


def _train(vae: Any, draw: Any, *, num_steps: int) -> None:  # Any: the autoencoders share no base with `encode`
    def batch_loss() -> Tensor:
        given = draw()
        posterior = vae.encode(given).latent_dist
        restored = vae.decode(posterior.sample()).sample
        error = nn.functional.l1_loss(restored, given) + nn.functional.mse_loss(restored, given)
        return error + KL_WEIGHT * posterior.kl().sum() / posterior.mean.numel()

    fit(
        vae,
        batch_loss,
        num_steps=num_steps,
        muon_rate=0.02,
        adam_rate=4e-3,
        decay=0.6,
        is_hidden=lambda name: "conv" in name,
    )
