"""Make the base checkpoint of the shapes world: `python -m unirl.worlds.shapes.pretrain --out DIR [--seed 0]`.

Four stages, each with a fixed number of steps: text encoders, autoencoder, a bank of encoded images, transformer. The
result is a folder for `StableDiffusion3Pipeline.from_pretrained`. docs/shapes_world.md has the time and the figures.

Shape letters: B samples, C H W latent.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch import Tensor, nn

from unirl.pretraining.flow_matching import LatentBank, train_on_bank
from unirl.pretraining.saving import save_pipeline_half
from unirl.reward.worlds.shapes_grammar import parse_prompt
from unirl.worlds.shapes import text, world
from unirl.worlds.shapes.evaluate import Conditioning, encode_prompts, evaluate

logger = logging.getLogger(__name__)

SHIFT = 3.0
"""Of the noise schedule; the sampler uses the same."""
LATENT_CHANNELS = 4
LATENT_SIDE = 8
WIDTH = 176
NUM_HEADS = 2

DRAWINGS_PER_LAYOUT = 40
CAPTIONED_LAYOUTS = 512
"""Layouts drawn for each prompt, near misses among them."""
CATEGORY_SHARES = {"single": 0.10, "color": 0.20, "two": 0.20, "count": 0.18, "position": 0.32}
"""Shares of the pretraining samples: in proportion to how hard a category is to learn."""
NULL_PROMPT_FRACTION = 0.05
"""Samples with the empty prompt, so that classifier-free guidance has something to guide from."""


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each stage."""

    text: int = 300
    autoencoder: int = 700
    transformer: int = 4000


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
    prompts = world.all_prompts()

    clips, t5 = [text.make_clip(), text.make_clip()], text.make_t5()
    text.pretrain_text_encoders(prompts, clips, t5, num_steps=budget.text)
    vae = make_autoencoder()
    train_autoencoder(vae, rng, num_steps=budget.autoencoder)

    def encode(pictures: Tensor) -> tuple[Tensor, Tensor]:
        posterior, scale = vae.encode(pictures).latent_dist, vae.config["scaling_factor"]
        return (posterior.mean - vae.config["shift_factor"]) * scale, posterior.std * scale

    bank = fill_bank(encode, prompts, rng)
    # The pipeline asks for the CLIPTokenizer class; any fast tokenizer with CLIP's markers does.
    pipeline = StableDiffusion3Pipeline(
        transformer=make_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae.eval(),
        text_encoder=clips[0].eval(),
        tokenizer=text.make_tokenizer(has_start=True, max_length=text.CLIP_TOKENS),  # ty: ignore[invalid-argument-type]
        text_encoder_2=clips[1].eval(),
        tokenizer_2=text.make_tokenizer(has_start=True, max_length=text.CLIP_TOKENS),  # ty: ignore[invalid-argument-type]
        text_encoder_3=t5.eval(),
        tokenizer_3=text.make_tokenizer(has_start=False, max_length=text.T5_TOKENS),
    )
    conditioning = encode_prompts(pipeline, [*prompts, ""])

    def snapshot(averaged: SD3Transformer2DModel) -> None:
        pipeline.transformer = averaged
        save_pipeline_half(pipeline, out)
        logger.info("held-out: %s", evaluate(pipeline, world.split_prompts()[1], num_samples=256, num_steps=10))

    train_transformer(
        pipeline.transformer, bank, conditioning, num_steps=budget.transformer, snapshot=snapshot, every=snapshot_every
    )


def make_autoencoder() -> AutoencoderKL:
    """Images [3, 32, 32] to latents [4, 8, 8]; 0.18 M parameters."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 16, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=world.IMAGE_SIDE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def make_transformer() -> SD3Transformer2DModel:
    """The SD3 transformer with three joint blocks of width 176; 3.2 M parameters.

    As wide as 8 MB allow: a CPU reaches a higher share of its matrix rate than with four narrower blocks.
    """
    return SD3Transformer2DModel(
        sample_size=LATENT_SIDE,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=3,
        attention_head_dim=WIDTH // NUM_HEADS,
        num_attention_heads=NUM_HEADS,
        caption_projection_dim=WIDTH,
        joint_attention_dim=text.T5_WIDTH,
        pooled_projection_dim=text.T5_WIDTH,
        pos_embed_max_size=LATENT_SIDE // 2,
    )


def train_autoencoder(
    vae: AutoencoderKL,
    rng: np.random.Generator,
    *,
    num_steps: int,
    batch_size: int = 32,
    learning_rate: float = 4e-3,
    kl_weight: float = 1e-3,
) -> None:
    """Train on drawings of random layouts, then set scale and shift so that latents have mean 0 and variance 1."""
    layouts = world.all_layouts()
    drawings = draw(layouts, rng, 6)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=num_steps, pct_start=0.1)
    for step in range(num_steps):
        pictures = as_vae_input(drawings[torch.randint(len(drawings), (batch_size,))])
        posterior = vae.encode(pictures).latent_dist
        restored = vae.decode(posterior.sample()).sample
        error = nn.functional.l1_loss(restored, pictures) + nn.functional.mse_loss(restored, pictures)
        loss = error + kl_weight * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == num_steps - 1:
            logger.info("autoencoder step %d loss %.4f error %.4f", step, loss.item(), error.item())
    with torch.no_grad():
        latents = vae.encode(as_vae_input(drawings[torch.randint(len(drawings), (1024,))])).latent_dist.sample()
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


@torch.no_grad()
def fill_bank(
    encode: Callable[[Tensor], tuple[Tensor, Tensor]], prompts: list[str], rng: np.random.Generator
) -> LatentBank:
    """Encode DRAWINGS_PER_LAYOUT drawings of every layout, and draw the layouts that captions come with.

    encode: pictures [B, 3, 32, 32] in [-1, 1] to mean and deviation of their latents, as the transformer sees them.
    """
    layouts = world.all_layouts()
    encoded = [encode(as_vae_input(part)) for part in draw(layouts, rng, DRAWINGS_PER_LAYOUT).split(256)]
    means, stds = zip(*encoded, strict=True)
    by_layout = (len(layouts), DRAWINGS_PER_LAYOUT)
    index = {layout: number for number, layout in enumerate(layouts)}
    specs = [parse_prompt(prompt) for prompt in prompts]
    captioned = [
        [
            index[world.sample_layout(spec, rng, world.NEAR_MISS_FRACTION[spec.category])]
            for _ in range(CAPTIONED_LAYOUTS)
        ]
        for spec in specs
    ]
    sizes = {category: sum(spec.category == category for spec in specs) for category in CATEGORY_SHARES}
    bank = LatentBank(
        mean_LJ=torch.cat(means).unflatten(0, by_layout),
        std_LJ=torch.cat(stds).unflatten(0, by_layout),
        scenes_PN=torch.tensor(captioned),
        prompt_weights_P=torch.tensor([CATEGORY_SHARES[spec.category] / sizes[spec.category] for spec in specs]),
    )
    logger.info("bank of %d drawings, posterior std %.3f", len(means) * 256, bank.std_LJ.mean().item())
    return bank


def train_transformer(
    transformer: SD3Transformer2DModel,
    bank: LatentBank,
    conditioning: Conditioning,
    *,
    num_steps: int,
    snapshot: Callable[[SD3Transformer2DModel], None],
    every: int,
) -> None:
    """Flow matching on captioned layouts; see `train_on_bank`."""

    def predict_velocity(noisy_BCHW: Tensor, sigma_B: Tensor, row_B: Tensor) -> Tensor:
        return transformer(
            hidden_states=noisy_BCHW,
            timestep=1000 * sigma_B,
            encoder_hidden_states=conditioning.tokens_BTD[row_B],
            pooled_projections=conditioning.pooled_BD[row_B],
            return_dict=False,
        )[0]

    train_on_bank(
        transformer,
        bank,
        predict_velocity,
        num_steps=num_steps,
        shift=SHIFT,
        null_fraction=NULL_PROMPT_FRACTION,
        is_hidden=lambda name: ".attn." in name or ".ff" in name,
        snapshot=snapshot,
        every=every,
    )


def draw(layouts: list[world.Layout], rng: np.random.Generator, repeats: int) -> Tensor:
    """`repeats` drawings of each layout, uint8 [L * repeats, 3, 32, 32]."""
    return torch.from_numpy(np.stack([world.render(layout, rng) for layout in layouts for _ in range(repeats)]))


def as_vae_input(pictures_B: Tensor) -> Tensor:
    """uint8 pictures in [-1, 1]."""
    return pictures_B.float() / 127.5 - 1


if __name__ == "__main__":
    main()
