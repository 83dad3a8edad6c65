"""Make the FLUX.2 base of the shapes world: `python -m unirl.worlds.shapes.pretrain_flux2 --out DIR [--seed 0]`.

The autoencoder is the shipped one of SD3 in FLUX.2's class, with the statistics of its latents in patches of 2 x 2.
A Qwen3 and the transformer are trained, with a fixed number of steps. The result is a folder for
`Flux2KleinPipeline.from_pretrained`. docs/worlds/shapes.md has the time and the figures.

Shape letters: B samples, C H W latent in patches: 16 4 4.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from torch import Tensor

from unirl.models.patches import places
from unirl.pretraining.autoencoding import signed
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.flow_matching import train_flow
from unirl.pretraining.saving import save_pipeline_half
from unirl.worlds.shapes import flux2_text, world
from unirl.worlds.shapes.evaluate_flux2 import evaluate
from unirl.worlds.shapes.pretrain import SHIFT, draw, fill_bank

logger = logging.getLogger(__name__)

WIDTH = 128
NUM_HEADS = 2
SHIPPED_VAE = Path(__file__).parent / "checkpoint" / "vae"


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each stage."""

    text: int = 400
    transformer: int = 1700


def main() -> None:
    """Read the command line and make the checkpoint."""
    make_checkpoint(pretrain, Budget, __doc__)


def pretrain(out: Path, *, seed: int, budget: Budget, snapshot_every: int = 0) -> None:
    """Run all stages and write the checkpoint to `out`. Seeds the global generator of torch."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    prompts = world.all_prompts()

    encoder = flux2_text.make_qwen3()
    flux2_text.pretrain_qwen3(prompts, encoder, num_steps=budget.text)
    vae = adopt_autoencoder(rng)
    pipeline = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=encoder.eval(),
        tokenizer=flux2_text.make_qwen3_tokenizer(),
        transformer=make_transformer(),
    )
    pipeline.set_progress_bar_config(disable=True)

    def encode(pictures: Tensor) -> tuple[Tensor, Tensor]:
        posterior = vae.encode(pictures).latent_dist
        mean, std = patchified(posterior.mean), patchified(posterior.std)
        shift, scale = moments(vae)
        return (mean - shift) / scale, std / scale

    bank = fill_bank(encode, prompts, rng)
    with torch.no_grad():
        tokens_PTD, _ = pipeline.encode_prompt([*prompts, ""], max_sequence_length=flux2_text.TOKENS)

    transformer = pipeline.transformer

    def predict_velocity(noisy_B: Tensor, sigma_B: Tensor, prompt_B: Tensor) -> Tensor:
        tokens = tokens_PTD[prompt_B]
        found = transformer(
            hidden_states=noisy_B.flatten(2).mT,
            timestep=sigma_B,
            encoder_hidden_states=tokens,
            img_ids=places(1, *noisy_B.shape[-2:], 1, device=noisy_B.device),
            txt_ids=places(1, 1, 1, tokens.shape[1], device=tokens.device),
            return_dict=False,
        )[0]
        return found.mT.unflatten(2, noisy_B.shape[-2:])

    def snapshot(averaged: Flux2Transformer2DModel) -> None:
        pipeline.transformer = averaged
        save_pipeline_half(pipeline, out)
        logger.info("held-out: %s", evaluate(pipeline, world.split_prompts()[1], num_samples=256, num_steps=10))

    train_flow(
        transformer,
        bank.draw,
        predict_velocity,
        num_steps=budget.transformer,
        shift=SHIFT,
        is_hidden=lambda name: ".attn." in name or ".ff" in name,
        snapshot=snapshot,
        every=snapshot_every,
    )


def adopt_autoencoder(rng: np.random.Generator) -> AutoencoderKLFlux2:
    """The shipped autoencoder as FLUX.2's class: images [3, 32, 32] to latents [4, 8, 8], standardised in patches."""
    source = AutoencoderKL.from_pretrained(SHIPPED_VAE)
    names = (
        "down_block_types",
        "up_block_types",
        "block_out_channels",
        "layers_per_block",
        "latent_channels",
        "norm_num_groups",
        "sample_size",
        "mid_block_add_attention",
        "use_quant_conv",
        "use_post_quant_conv",
    )
    vae = AutoencoderKLFlux2(**{name: source.config[name] for name in names})
    missing, unexpected = vae.load_state_dict(source.state_dict(), strict=False)
    if unexpected or any(not name.startswith("bn.") for name in missing):
        raise ValueError(f"{SHIPPED_VAE} does not fit AutoencoderKLFlux2: missing {missing}, unexpected {unexpected}")
    with torch.no_grad():
        drawings = signed(draw(world.all_layouts(), rng, 1))
        latents = patchified(vae.encode(drawings).latent_dist.sample())
        vae.get_buffer("bn.running_mean").copy_(latents.mean((0, 2, 3)))
        vae.get_buffer("bn.running_var").copy_(latents.var((0, 2, 3)))
    return vae.eval()


def patchified(latents: Tensor) -> Tensor:
    """[B, C, 2 h, 2 w] to [B, 4 C, h, w]."""
    return torch.nn.functional.pixel_unshuffle(latents, 2)


def moments(vae: AutoencoderKLFlux2) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the latents in patches, [1, 4 C, 1, 1]."""
    mean, variance = vae.get_buffer("bn.running_mean"), vae.get_buffer("bn.running_var")
    std = (variance + vae.config["batch_norm_eps"]).sqrt()
    return mean[None, :, None, None], std[None, :, None, None]


def make_transformer() -> Flux2Transformer2DModel:
    """The FLUX.2 transformer with two double and three single blocks of width 128; 1.8 M parameters."""
    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=WIDTH // NUM_HEADS,
        num_attention_heads=NUM_HEADS,
        joint_attention_dim=len(flux2_text.READ_LAYERS) * flux2_text.WIDTH,
        axes_dims_rope=(8, 24, 24, 8),
        guidance_embeds=False,
    )


if __name__ == "__main__":
    main()
