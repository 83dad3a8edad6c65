"""Make the base checkpoint of the shapes world: `python -m unirl.worlds.shapes.pretrain --out DIR [--seed 0]`.

Four stages, each with a fixed number of steps: text encoders, autoencoder, a bank of encoded images, transformer. The
result is a folder for `StableDiffusion3Pipeline.from_pretrained`. docs/worlds/shapes.md has the time and the figures.

Shape letters: B samples, C H W latent.
"""

from __future__ import annotations

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
from torch import Tensor

from unirl.pretraining import autoencoding
from unirl.pretraining.autoencoding import signed
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.flow_matching import LatentBank, conditioned_velocity, train_flow
from unirl.pretraining.saving import save_pipeline_half
from unirl.reward.worlds.shapes_grammar import parse_prompt
from unirl.worlds.shapes import text, world
from unirl.worlds.shapes.evaluate import encode_prompts, evaluate

logger = logging.getLogger(__name__)

SHIFT = 3.0
"""Shift of the noise schedule; the sampler uses the same."""
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
    make_checkpoint(pretrain, Budget, __doc__)


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
    conditions_P = encode_prompts(pipeline, [*prompts, ""])

    def snapshot(averaged: SD3Transformer2DModel) -> None:
        pipeline.transformer = averaged
        save_pipeline_half(pipeline, out)
        logger.info("held-out: %s", evaluate(pipeline, world.split_prompts()[1], num_samples=256, num_steps=10))

    train_flow(
        pipeline.transformer,
        bank.draw,
        conditioned_velocity(pipeline.transformer, conditions_P),
        num_steps=budget.transformer,
        shift=SHIFT,
        is_hidden=lambda name: ".attn." in name or ".ff" in name,
        snapshot=snapshot,
        every=snapshot_every,
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


def train_autoencoder(vae: AutoencoderKL, rng: np.random.Generator, *, num_steps: int) -> None:
    """Train on drawings of random layouts, then set scale and shift so that latents have mean 0 and variance 1."""
    layouts = world.all_layouts()
    drawings = draw(layouts, rng, 6)
    autoencoding.train_autoencoder(vae, drawings, signed, num_steps=num_steps, batch_size=32)
    with torch.no_grad():
        latents = vae.encode(signed(drawings[torch.randint(len(drawings), (1024,))])).latent_dist.sample()
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


@torch.no_grad()
def fill_bank(
    encode: Callable[[Tensor], tuple[Tensor, Tensor]], prompts: list[str], rng: np.random.Generator
) -> LatentBank:
    """Encode DRAWINGS_PER_LAYOUT drawings of every layout, and draw the layouts that captions come with.

    encode: images [B, 3, 32, 32] in [-1, 1] to mean and deviation of their latents, as the transformer sees them.
    """
    layouts = world.all_layouts()
    encoded = [encode(signed(part)) for part in draw(layouts, rng, DRAWINGS_PER_LAYOUT).split(256)]
    return LatentBank.of_scenes(
        encoded,
        layouts,
        [parse_prompt(prompt) for prompt in prompts],
        lambda spec: world.sample_layout(spec, rng, world.NEAR_MISS_FRACTION[spec.category]),
        num_captioned=CAPTIONED_LAYOUTS,
        category_shares=CATEGORY_SHARES,
        null_fraction=NULL_PROMPT_FRACTION,
    )


def draw(layouts: list[world.Layout], rng: np.random.Generator, repeats: int) -> Tensor:
    """`repeats` drawings of each layout, uint8 [L * repeats, 3, 32, 32]."""
    return torch.from_numpy(np.stack([world.render(layout, rng) for layout in layouts for _ in range(repeats)]))


if __name__ == "__main__":
    main()
