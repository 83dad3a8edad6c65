"""Make the base checkpoint of the sounds world: `python -m unirl.worlds.sounds.pretrain --out DIR [--seed 0]`.

Stages, each with a fixed number of steps: text encoder and connectors, autoencoder of videos, autoencoder of sounds,
vocoder, transformer. The result is a folder for `LTX2Pipeline.from_pretrained`. docs/worlds/sounds.md has the time and
the figures.

Shape letters: B samples, C F H W latent of a video, A P M of a sound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline
from torch import Tensor

from unirl.models.ltx2.adapter import LTX2Adapter
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.flow_matching import LatentBank, train_flow
from unirl.pretraining.saving import rounded, save_pipeline_half
from unirl.reward.worlds.moves_grammar import MovesSpec
from unirl.reward.worlds.sounds_grammar import TONES, SoundsSpec
from unirl.types.conditions import TextEmbedCondition
from unirl.worlds.sounds import autoencoders, text, world
from unirl.worlds.sounds.evaluate import PARAMS, SHIFT, encode_prompts, evaluate, load
from unirl.worlds.sounds.spectrogram import spectrogram

logger = logging.getLogger(__name__)

WIDTH, AUDIO_WIDTH = 96, 64
NUM_VIDEOS, NUM_SOUNDS = 3600, 1000
"""Drawings that the autoencoders are taught with."""
DRAWINGS = 96
"""Drawings of each video and each sound that the transformer is taught with."""
CAPTIONED = 200
"""Videos and sounds drawn for each caption, near misses among them."""
NULL_PROMPT_FRACTION = 0.05
"""Samples with the empty prompt, so that classifier-free guidance has something to guide from."""


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each stage."""

    text: int = 300
    video: int = 1400
    audio: int = 400
    vocoder: int = 400
    transformer: int = 1500


def main() -> None:
    """Read the command line and make the checkpoint."""
    make_checkpoint(pretrain, Budget, __doc__)


def pretrain(out: Path, *, seed: int, budget: Budget, snapshot_every: int = 0) -> None:
    """Run all stages and write the checkpoint to `out`. Seeds the global generator of torch."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    encoder, connectors = text.make_encoder(), text.make_connectors()
    text.pretrain_text_encoder(world.all_prompts(), encoder, connectors, num_steps=budget.text)
    vae, audio_vae = autoencoders.make_video_autoencoder(), autoencoders.make_audio_autoencoder()
    autoencoders.train_video_autoencoder(vae, rng, num_steps=budget.video, num_videos=NUM_VIDEOS)
    autoencoders.train_audio_autoencoder(audio_vae, rng, num_steps=budget.audio, num_sounds=NUM_SOUNDS)
    vocoder = autoencoders.make_vocoder()
    autoencoders.train_vocoder(vocoder, audio_vae, rng, num_steps=budget.vocoder, num_sounds=NUM_SOUNDS)
    pipeline = LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=rounded(vae),
        audio_vae=rounded(audio_vae),
        text_encoder=rounded(encoder),
        tokenizer=text.make_tokenizer(),
        connectors=rounded(connectors),
        transformer=make_transformer(),
        vocoder=rounded(vocoder),
    )
    save_pipeline_half(pipeline, out)
    train_transformer(pipeline, out, rng, num_steps=budget.transformer, snapshot_every=snapshot_every)


def train_transformer(
    pipeline: LTX2Pipeline, out: Path, rng: np.random.Generator, *, num_steps: int, snapshot_every: int
) -> None:
    """Teach the transformer of a folder, by the velocity and the conditions of the trainer's own LTX-2."""
    ours = load(out)

    def snapshot(averaged: LTX2VideoTransformer3DModel) -> None:
        pipeline.transformer = averaged
        save_pipeline_half(pipeline, out)
        logger.info("held-out: %s", evaluate(load(out), world.split_prompts()[1], num_samples=256, num_steps=10))

    train_flow(
        ours.bundle.transformer,
        fill_banks(ours, rng),
        conditioned_velocity(ours),
        num_steps=num_steps,
        shift=SHIFT,
        is_hidden=lambda name: name.startswith("transformer_blocks") and name.endswith(".weight"),
        average=0.995,
        snapshot=snapshot,
        every=snapshot_every,
    )


def make_transformer() -> LTX2VideoTransformer3DModel:
    """The LTX-2 transformer with three blocks; 1.1 M parameters. A sample is eight tokens of video and six of sound."""
    return LTX2VideoTransformer3DModel(
        in_channels=autoencoders.LATENT_CHANNELS,
        out_channels=autoencoders.LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=WIDTH // 2,
        cross_attention_dim=WIDTH,
        vae_scale_factors=(autoencoders.TEMPORAL, autoencoders.SPATIAL, autoencoders.SPATIAL),
        pos_embed_max_pos=1,
        base_height=world.IMAGE_SIDE,
        base_width=world.IMAGE_SIDE,
        audio_in_channels=autoencoders.AUDIO_LATENT,
        audio_out_channels=autoencoders.AUDIO_LATENT,
        audio_num_attention_heads=2,
        audio_attention_head_dim=AUDIO_WIDTH // 2,
        audio_cross_attention_dim=AUDIO_WIDTH,
        audio_pos_embed_max_pos=1,
        audio_sampling_rate=world.RATE,
        audio_hop_length=world.HOP,
        num_layers=3,
        caption_channels=text.WIDTH,
    )


def conditioned_velocity(ours: LTX2Adapter) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The velocity of latents at noise levels, of captions by their number; the last number is the empty one."""
    read = encode_prompts(ours, [*world.all_prompts(), ""])["text"]
    assert isinstance(read, TextEmbedCondition)  # noqa: S101 - what the family's encoder returns

    def predict_velocity(noisy_B: Tensor, sigma_B: Tensor, number_B: Tensor) -> Tensor:
        chosen = TextEmbedCondition(embeds=read.embeds[number_B], attention_mask=read.mask[number_B])
        return ours.predict(noisy_B, sigma_B, {"text": chosen}, PARAMS)

    return predict_velocity


@torch.no_grad()
def fill_banks(ours: LTX2Adapter, rng: np.random.Generator) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Encode drawings of all videos and sounds; what draws latents of both with the number of their caption.

    A caption's video and its sound are drawn independently, so each is wrong as often whatever the other is.
    """
    vae, audio_vae = ours.bundle.vae, ours.bundle.audio_vae
    objects, sounds = world.all_objects(), world.all_sounds()
    seen = []
    for drawings in autoencoders.draw_videos([each for each in objects for _ in range(DRAWINGS)], rng).split(128):
        posterior = vae.encode(autoencoders.as_video_input(drawings)).latent_dist
        seen.append((ours.from_vae(posterior.mean), posterior.std / vae.latents_std.view(1, -1, 1, 1, 1)))
    waves_BL = autoencoders.draw_sounds([each for each in sounds for _ in range(DRAWINGS)], rng)
    posterior = audio_vae.encode(spectrogram(waves_BL)).latent_dist
    mean, std = audio_moments(audio_vae)
    videos = LatentBank.of_scenes(
        seen,
        objects,
        [MovesSpec((each,)) for each in objects],
        lambda spec: world.sample_video(spec.objects[0], rng, world.NEAR_MISS_FRACTION),
        num_captioned=CAPTIONED,
        category_shares={"single": 1.0},
        null_fraction=0.0,
    )
    heard = LatentBank.of_scenes(
        [((posterior.mean - mean) / std, posterior.std / std)],
        sounds,
        [SoundsSpec(MovesSpec((objects[0],)), tone) for tone in TONES],
        lambda spec: world.sample_sound(spec.tone, rng, world.NEAR_MISS_FRACTION),
        num_captioned=CAPTIONED,
        category_shares=dict.fromkeys(TONES, 1.0),
        null_fraction=0.0,
    )

    def draw(num: int) -> tuple[Tensor, Tensor]:
        video_B, object_B = videos.draw(num)
        sound_B, tone_B = heard.draw(num)
        number_B = object_B * len(TONES) + tone_B
        is_null_B = torch.rand(num) < NULL_PROMPT_FRACTION
        latents = torch.cat([video_B.flatten(1), sound_B.flatten(1)], dim=1)
        return latents, torch.where(is_null_B, len(objects) * len(TONES), number_B)

    return draw


def audio_moments(vae: AutoencoderKLLTX2Audio) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel and bin of a sound's latents, [1, A, 1, M]."""
    shape = (1, autoencoders.AUDIO_CHANNELS, 1, -1)
    return vae.latents_mean.view(shape), vae.latents_std.view(shape)


if __name__ == "__main__":
    main()
