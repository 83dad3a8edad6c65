"""Make the base checkpoint of the moves world: `python -m unirl.worlds.moves.pretrain --out DIR [--seed 0]`.

Four stages, each with a fixed number of steps: text encoder, autoencoder, a bank of encoded videos, transformer. The
result is a folder for `WanPipeline.from_pretrained`. docs/worlds/moves.md has the time and the figures.

Shape letters: B samples, C F H W latent, T frames.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, unpatchify
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from torch import Tensor, nn

from unirl.models.diffusers_pipeline.normalisation import channel_moments
from unirl.pretraining.autoencoding import signed
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.fit import fit
from unirl.pretraining.flow_matching import LatentBank, conditioned_velocity, train_flow
from unirl.pretraining.saving import rounded, save_pipeline_half
from unirl.worlds.moves import text, world
from unirl.worlds.moves.evaluate import encode_prompts, evaluate

logger = logging.getLogger(__name__)

OptionT = TypeVar("OptionT")

SHIFT = 3.0
"""Shift of the noise schedule; the sampler uses the same."""
LATENT_CHANNELS = 16
WIDTH = 192
NUM_HEADS = 3

AUTOENCODER_SCENES = 3000
DRAWINGS_PER_SCENE = 2
CAPTIONED_SCENES = 64
"""Scenes drawn for each prompt, near misses among them."""
CATEGORY_SHARES = {"single": 0.25, "pair": 0.75}
"""Shares of the pretraining samples: in proportion to how hard a category is to learn."""
NULL_PROMPT_FRACTION = 0.05
"""Samples with the empty prompt, so that classifier-free guidance has something to guide from."""


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each stage."""

    text: int = 300
    autoencoder: int = 1100
    transformer: int = 1500


def main() -> None:
    """Read the command line and make the checkpoint."""
    make_checkpoint(pretrain, Budget, __doc__)


def pretrain(out: Path, *, seed: int, budget: Budget, snapshot_every: int = 0) -> None:
    """Run all stages and write the checkpoint to `out`. Seeds the global generator of torch."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    encoder = text.make_encoder()
    text.pretrain_text_encoder(world.all_prompts(), encoder, num_steps=budget.text)
    vae = make_autoencoder()
    train_autoencoder(vae, rng, num_steps=budget.autoencoder)
    pipeline = WanPipeline(
        tokenizer=text.make_tokenizer(),  # ty: ignore[invalid-argument-type] - any fast tokenizer does
        text_encoder=rounded(encoder),
        vae=rounded(vae),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        transformer=make_transformer(),
    )
    save_pipeline_half(pipeline, out)
    bank = fill_bank(pipeline.vae, rng)
    conditions_P = encode_prompts(pipeline, [*world.all_prompts(), ""])

    def snapshot(averaged: WanTransformer3DModel) -> None:
        pipeline.transformer = averaged
        save_pipeline_half(pipeline, out)
        logger.info("held-out: %s", evaluate(pipeline, world.split_prompts()[1], num_samples=256, num_steps=10))

    train_flow(
        pipeline.transformer,
        bank.draw,
        conditioned_velocity(pipeline.transformer, conditions_P),
        num_steps=budget.transformer,
        shift=SHIFT,
        is_hidden=lambda name: ".attn" in name or ".ffn." in name,
        average=0.995,
        snapshot=snapshot,
        every=snapshot_every,
    )


def make_autoencoder() -> AutoencoderKLWan:
    """Videos [3, 5, 32, 32] to latents [16, 2, 4, 4], Wan 2.1's compression of 8 in space and 4 in time.

    Space goes by two convolutions and, as in Wan 2.2, a first step that folds 2 x 2 pixels into channels: at full
    resolution causal convolutions would cost a CPU more than the transformer.
    """
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )


def make_transformer() -> WanTransformer3DModel:
    """The Wan transformer with three blocks of width 192; 1.9 M parameters.

    A patch is a quadrant of a latent frame, so a video is eight tokens.
    """
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=NUM_HEADS,
        attention_head_dim=WIDTH // NUM_HEADS,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=text.WIDTH,
        freq_dim=64,
        ffn_dim=3 * WIDTH,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def train_autoencoder(
    vae: AutoencoderKLWan,
    rng: np.random.Generator,
    *,
    num_steps: int,
    batch_size: int = 16,
    kl_weight: float = 3e-5,
    after_step: Callable[[int], None] | None = None,
) -> None:
    """Train on drawings with an object in every quadrant, then set mean and deviation of the latents by channel."""
    moving = [spec.objects[0] for spec in world.all_specs() if spec.category == "single"]
    crowded = [world.scene_of({place: _pick(moving, rng) for place in range(4)}) for _ in range(AUTOENCODER_SCENES)]
    drawings = _draw(crowded, rng, 1)

    def batch_loss() -> Tensor:
        videos = _as_vae_input(drawings[torch.randint(len(drawings), (batch_size,))])
        posterior = vae.encode(videos).latent_dist
        restored = _decode_unclamped(vae, posterior.sample())
        error = nn.functional.l1_loss(restored, videos) + nn.functional.mse_loss(restored, videos)
        return error + kl_weight * posterior.kl().sum(-1).mean() / posterior.mean[0].numel()

    # Images must show in the latents before the prior can blur them: a deviation of e^-2 to begin with.
    assert vae.quant_conv.bias is not None  # noqa: S101 - the class has one
    nn.init.constant_(vae.quant_conv.bias[LATENT_CHANNELS:], -4.0)
    fit(
        vae,
        batch_loss,
        num_steps=num_steps,
        muon_rate=0.02,
        adam_rate=4e-3,
        decay=0.6,
        is_hidden=lambda name: "conv" in name or "resample" in name,
        after_step=after_step,
    )
    with torch.no_grad():
        scenes = [world.sample_scene(spec, rng, 0.0) for spec in world.all_specs()[::3]]
        latents = vae.encode(_as_vae_input(_draw(scenes, rng, 1))).latent_dist.sample()
    vae.register_to_config(
        latents_mean=latents.mean((0, 2, 3, 4)).tolist(), latents_std=latents.std((0, 2, 3, 4)).tolist()
    )


@torch.no_grad()
def fill_bank(vae: AutoencoderKLWan, rng: np.random.Generator) -> LatentBank:
    """Encode DRAWINGS_PER_SCENE drawings of every scene, and draw the scenes that captions come with."""
    specs = world.all_specs()
    scenes = sorted({scene for spec in specs for scene in world.scenes_for(spec)}, key=str)
    encoded = []
    for drawings in _draw(scenes, rng, DRAWINGS_PER_SCENE).split(128):
        posterior = vae.encode(_as_vae_input(drawings)).latent_dist
        mean, std = channel_moments(posterior.mean, vae.config)
        encoded.append(((posterior.mean - mean) / std, posterior.std / std))
    return LatentBank.of_scenes(
        encoded,
        scenes,
        specs,
        lambda spec: world.sample_scene(spec, rng, world.NEAR_MISS_FRACTION),
        num_captioned=CAPTIONED_SCENES,
        category_shares=CATEGORY_SHARES,
        null_fraction=NULL_PROMPT_FRACTION,
    )


def _decode_unclamped(vae: AutoencoderKLWan, latents_BCFHW: Tensor) -> Tensor:
    """Videos before the clamp of `decode`: pixels that a new decoder puts below the range would have no gradient."""
    chunks: list[Tensor] = []
    hook = vae.decoder.register_forward_hook(lambda module, inputs, output: chunks.append(output))
    vae.decode(latents_BCFHW)
    hook.remove()
    return unpatchify(torch.cat(chunks, dim=2), patch_size=vae.config["patch_size"])


def _pick(options: Sequence[OptionT], rng: np.random.Generator) -> OptionT:
    return options[int(rng.integers(len(options)))]


def _draw(scenes: list[world.Scene], rng: np.random.Generator, repeats: int) -> Tensor:
    """`repeats` drawings of each scene, uint8 [L * repeats, T, 3, 32, 32]."""
    return torch.from_numpy(np.stack([world.render(scene, rng) for scene in scenes for _ in range(repeats)]))


def _as_vae_input(videos_BTCHW: Tensor) -> Tensor:
    return signed(videos_BTCHW).transpose(1, 2)


if __name__ == "__main__":
    main()
