"""Sample a shapes checkpoint and judge it: `python -m unirl.worlds.shapes.evaluate --checkpoint DIR [--steps 10]`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch import Tensor

from unirl.reward.worlds.shapes import score_shapes
from unirl.reward.worlds.shapes_grammar import CATEGORIES, parse_prompt
from unirl.worlds.shapes import text, world

logger = logging.getLogger(__name__)

BATCH_SIZE = 128


@dataclass(frozen=True)
class Conditioning:
    """What the transformer reads of prompts."""

    tokens_BTD: Tensor
    pooled_BD: Tensor

    def rows(self, index_B: Tensor) -> Conditioning:
        """The conditioning of some of the prompts."""
        return Conditioning(self.tokens_BTD[index_B], self.pooled_BD[index_B])


@torch.no_grad()
def encode_prompts(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> Conditioning:
    """Encode with the pipeline's own method, at the token lengths of the shapes world."""
    tokens, _, pooled, _ = pipeline.encode_prompt(
        prompt=prompts,
        prompt_2=prompts,
        prompt_3=prompts,
        do_classifier_free_guidance=False,
        max_sequence_length=text.T5_TOKENS,
    )
    return Conditioning(tokens.float(), pooled.float())


def shifted_sigmas(num_steps: int, shift: float) -> Tensor:
    """Noise levels 1 = sigma_0 > ... > sigma_T = 0: a linear grid, shifted once; float32 [num_steps + 1]."""
    linear = torch.linspace(1, 0, num_steps + 1)
    return shift * linear / (1 + (shift - 1) * linear)


@torch.no_grad()
def sample_latents(
    transformer: SD3Transformer2DModel, conditioning: Conditioning, noise_BCHW: Tensor, sigmas: Tensor
) -> Tensor:
    """Euler steps from `noise_BCHW` along `sigmas`, without guidance."""
    latents = noise_BCHW
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        velocity = transformer(
            hidden_states=latents,
            timestep=(1000 * sigma).expand(len(latents)),
            encoder_hidden_states=conditioning.tokens_BTD,
            pooled_projections=conditioning.pooled_BD,
            return_dict=False,
        )[0]
        latents = latents + (following - sigma) * velocity
    return latents


@torch.no_grad()
def decode_latents(vae: AutoencoderKL, latents_BCHW: Tensor) -> Tensor:
    """Images in [0, 1]."""
    config = vae.config
    pictures = vae.decode(latents_BCHW / config["scaling_factor"] + config["shift_factor"]).sample
    return (pictures / 2 + 0.5).clamp(0, 1)


def evaluate(
    pipeline: StableDiffusion3Pipeline, prompts: list[str], *, num_samples: int, num_steps: int, seed: int = 1234
) -> dict[str, float]:
    """`accuracy` of an SD3 checkpoint. Noise depends on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    sigmas = shifted_sigmas(num_steps, pipeline.scheduler.config["shift"])
    side, channels = pipeline.transformer.config["sample_size"], pipeline.transformer.config["in_channels"]

    def draw(batch: list[str]) -> Tensor:
        noise = torch.randn(len(batch), channels, side, side, generator=generator)
        latents = sample_latents(pipeline.transformer, encode_prompts(pipeline, batch), noise, sigmas)
        return decode_latents(pipeline.vae, latents)

    return accuracy(draw, prompts, num_samples=num_samples)


def accuracy(draw: Callable[[list[str]], Tensor], prompts: list[str], *, num_samples: int) -> dict[str, float]:
    """Strict accuracy over all samples and per category, and the mean soft score.

    draw(prompts) -> images [B, 3, 32, 32] in [0, 1]. The samples go round the prompts in order.
    """
    chosen = [prompts[index % len(prompts)] for index in range(num_samples)]
    strict: list[float] = []
    soft: list[float] = []
    for start in range(0, num_samples, BATCH_SIZE):
        batch = chosen[start : start + BATCH_SIZE]
        strict_B, soft_B = score_shapes(draw(batch), batch)
        strict += strict_B.tolist()
        soft += soft_B.tolist()
    result = {"strict": fmean(strict), "soft": fmean(soft)}
    for category in CATEGORIES:
        result[category] = fmean(s for s, p in zip(strict, chosen, strict=True) if parse_prompt(p).category == category)
    return {name: round(value, 3) for name, value in result.items()}


def print_accuracy(
    judge: Callable[[Path, list[str], argparse.Namespace], dict[str, float]], description: str | None
) -> None:
    """Read a command line of a checkpoint and print what `judge` finds on the prompts of RL and on those held out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    for name, prompts in zip(("train", "heldout"), world.split_prompts(), strict=True):
        logger.info("%s %s", name, judge(arguments.checkpoint, prompts, arguments))


def main() -> None:
    """Print the held-out accuracy of an SD3 checkpoint."""

    def judge(checkpoint: Path, prompts: list[str], options: argparse.Namespace) -> dict[str, float]:
        pipeline = StableDiffusion3Pipeline.from_pretrained(checkpoint, torch_dtype=torch.float32)
        return evaluate(pipeline, prompts, num_samples=options.samples, num_steps=options.steps, seed=options.seed)

    print_accuracy(judge, __doc__)


if __name__ == "__main__":
    main()
