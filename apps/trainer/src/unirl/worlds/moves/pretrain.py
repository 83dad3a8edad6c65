"""Make the base checkpoint of the moves world: `python -m unirl.worlds.moves.pretrain --out DIR [--seed 0]`.

Four stages, each with a fixed number of steps: text encoder, autoencoder, a bank of encoded videos, transformer. The
result is a folder for `WanPipeline.from_pretrained`. docs/moves_world.md has the time and the figures.

Shape letters: B samples, C F H W latent, T frames.
"""

from __future__ import annotations

import argparse
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

from unirl.pretraining.fit import fit
from unirl.pretraining.flow_matching import LatentBank, train_on_bank
from unirl.pretraining.saving import save_pipeline_half
from unirl.worlds.moves import text, world
from unirl.worlds.moves.evaluate import encode_prompts, evaluate, latent_statistics

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=nn.Module)
OptionT = TypeVar("OptionT")

SHIFT = 3.0
"""Of the noise schedule; the sampler uses the same."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-steps", type=int, default=Budget.text)
    parser.add_argument("--autoencoder-steps", type=int, default=Budget.autoencoder)
    parser.add_argument("--transformer-steps", type=int, default=Budget.transformer)
    parser.add_argument("--snapshot-every", type=int, default=0, help="also save and judge every N transformer steps")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    torch.set_num_threads(1)
    budget = Budget(arguments.text_steps, arguments.autoencoder_steps, arguments.transformer_steps)
    pretrain(arguments.out, seed=arguments.seed, budget=budget, snapshot_every=arguments.snapshot_every)


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
        text_encoder=_rounded(encoder),
        vae=_rounded(vae),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        transformer=make_transformer(),
    )
    save_pipeline_half(pipeline, out)
    bank = fill_bank(pipeline.vae, rng)
    tokens_PTD = encode_prompts(pipeline, [*world.all_prompts(), ""])

    def snapshot(averaged: WanTransformer3DModel) -> None:
        pipeline.transformer = averaged
        save_pipeline_half(pipeline, out)
        logger.info("held-out: %s", evaluate(pipeline, world.split_prompts()[1], num_samples=256, num_steps=10))

    train_transformer(
        pipeline.transformer, bank, tokens_PTD, num_steps=budget.transformer, snapshot=snapshot, every=snapshot_every
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
    latent_mean, latent_std = latent_statistics(vae)
    means, stds = [], []
    for drawings in _draw(scenes, rng, DRAWINGS_PER_SCENE).split(128):
        posterior = vae.encode(_as_vae_input(drawings)).latent_dist
        means.append((posterior.mean - latent_mean) / latent_std)
        stds.append(posterior.std / latent_std)
    by_scene = (len(scenes), DRAWINGS_PER_SCENE)
    index = {scene: number for number, scene in enumerate(scenes)}
    captioned = [
        [index[world.sample_scene(spec, rng, world.NEAR_MISS_FRACTION)] for _ in range(CAPTIONED_SCENES)]
        for spec in specs
    ]
    sizes = {category: sum(spec.category == category for spec in specs) for category in CATEGORY_SHARES}
    bank = LatentBank(
        mean_LJ=torch.cat(means).unflatten(0, by_scene),
        std_LJ=torch.cat(stds).unflatten(0, by_scene),
        scenes_PN=torch.tensor(captioned),
        prompt_weights_P=torch.tensor([CATEGORY_SHARES[spec.category] / sizes[spec.category] for spec in specs]),
    )
    logger.info("bank of %d scenes, posterior std %.3f", len(scenes), bank.std_LJ.mean().item())
    return bank


def train_transformer(
    transformer: WanTransformer3DModel,
    bank: LatentBank,
    tokens_PTD: Tensor,
    *,
    num_steps: int,
    snapshot: Callable[[WanTransformer3DModel], None],
    every: int,
) -> None:
    """Flow matching on captioned scenes; see `train_on_bank`."""

    def predict_velocity(noisy_BCFHW: Tensor, sigma_B: Tensor, row_B: Tensor) -> Tensor:
        return transformer(
            hidden_states=noisy_BCFHW,
            timestep=1000 * sigma_B,
            encoder_hidden_states=tokens_PTD[row_B],
            return_dict=False,
        )[0]

    train_on_bank(
        transformer,
        bank,
        predict_velocity,
        num_steps=num_steps,
        shift=SHIFT,
        null_fraction=NULL_PROMPT_FRACTION,
        is_hidden=lambda name: ".attn" in name or ".ffn." in name,
        average=0.995,
        snapshot=snapshot,
        every=every,
    )


def _rounded(module: ModelT) -> ModelT:
    """For inference, with the weights that the checkpoint will hold."""
    return module.eval().half().float()


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
    return (videos_BTCHW.float() / 127.5 - 1).transpose(1, 2)


if __name__ == "__main__":
    main()
