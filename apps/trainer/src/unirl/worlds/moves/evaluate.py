"""Sample a moves checkpoint and judge it: `python -m unirl.worlds.moves.evaluate --checkpoint DIR [--steps 10]`."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from statistics import fmean

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from torch import Tensor

from unirl.reward.worlds.moves import score_moves
from unirl.reward.worlds.moves_grammar import CATEGORIES, parse_prompt
from unirl.worlds.moves import text, world
from unirl.worlds.shapes.evaluate import shifted_sigmas

logger = logging.getLogger(__name__)

BATCH_SIZE = 128


@torch.no_grad()
def encode_prompts(pipeline: WanPipeline, prompts: list[str]) -> Tensor:
    """Encode with the pipeline's own method, at the token length of the moves world; [B, T, D]."""
    tokens, _ = pipeline.encode_prompt(
        prompt=prompts, do_classifier_free_guidance=False, max_sequence_length=text.TOKENS
    )
    return tokens.float()


@torch.no_grad()
def sample_latents(
    transformer: WanTransformer3DModel, tokens_BTD: Tensor, noise_BCFHW: Tensor, sigmas: Tensor
) -> Tensor:
    """Euler steps from `noise_BCFHW` along `sigmas`, without guidance."""
    latents = noise_BCFHW
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        velocity = transformer(
            hidden_states=latents,
            timestep=(1000 * sigma).expand(len(latents)),
            encoder_hidden_states=tokens_BTD,
            return_dict=False,
        )[0]
        latents = latents + (following - sigma) * velocity
    return latents


def latent_statistics(vae: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents by channel, [C, 1, 1, 1]."""
    mean, std = (torch.tensor(vae.config[name]).view(-1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return mean, std


@torch.no_grad()
def decode_latents(vae: AutoencoderKLWan, latents_BCFHW: Tensor) -> Tensor:
    """Videos [B, T, 3, H, W] in [0, 1]."""
    mean, std = latent_statistics(vae)
    videos_BCTHW = vae.decode(latents_BCFHW * std + mean).sample
    return (videos_BCTHW / 2 + 0.5).clamp(0, 1).transpose(1, 2)


def evaluate(
    pipeline: WanPipeline, prompts: list[str], *, num_samples: int, num_steps: int, seed: int = 1234
) -> dict[str, float]:
    """Strict accuracy over all samples and per category, and the mean soft score.

    The samples go round the prompts in order. Noise depends on `seed` alone.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = [prompts[index % len(prompts)] for index in range(num_samples)]
    sigmas = shifted_sigmas(num_steps, pipeline.scheduler.config["shift"])
    config = pipeline.vae.config
    side = world.IMAGE_SIDE // config["scale_factor_spatial"]
    shape = config["z_dim"], (world.NUM_FRAMES - 1) // config["scale_factor_temporal"] + 1, side, side
    strict: list[float] = []
    soft: list[float] = []
    for start in range(0, num_samples, BATCH_SIZE):
        batch = chosen[start : start + BATCH_SIZE]
        noise = torch.randn(len(batch), *shape, generator=generator)
        latents = sample_latents(pipeline.transformer, encode_prompts(pipeline, batch), noise, sigmas)
        strict_B, soft_B = score_moves(list(decode_latents(pipeline.vae, latents)), batch)
        strict += strict_B.tolist()
        soft += soft_B.tolist()
    result = {"strict": fmean(strict), "soft": fmean(soft)}
    for category in CATEGORIES:
        result[category] = fmean(s for s, p in zip(strict, chosen, strict=True) if parse_prompt(p).category == category)
    return {name: round(value, 3) for name, value in result.items()}


def main() -> None:
    """Read the command line and print the accuracy of a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    pipeline = WanPipeline.from_pretrained(arguments.checkpoint, torch_dtype=torch.float32)
    for name, prompts in zip(("train", "heldout"), world.split_prompts(), strict=True):
        figures = evaluate(
            pipeline, prompts, num_samples=arguments.samples, num_steps=arguments.steps, seed=arguments.seed
        )
        logger.info("%s %s", name, figures)


if __name__ == "__main__":
    main()
