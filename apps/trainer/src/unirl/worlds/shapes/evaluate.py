"""Sample a shapes checkpoint and judge it: `python -m unirl.worlds.shapes.evaluate --checkpoint DIR [--steps 10]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch import Tensor

from unirl.pretraining import judging
from unirl.pretraining.sampling import euler_sample, shifted_sigmas
from unirl.reward.worlds.shapes import score_shapes
from unirl.reward.worlds.shapes_grammar import CATEGORIES, parse_prompt
from unirl.worlds.shapes import text, world


@torch.no_grad()
def encode_prompts(pipeline: StableDiffusion3Pipeline, prompts: Sequence[str]) -> dict[str, Tensor]:
    """What the transformer reads of prompts, by keyword: by the pipeline's own method, at the world's token lengths."""
    tokens, _, pooled, _ = pipeline.encode_prompt(
        prompt=list(prompts),
        prompt_2=list(prompts),
        prompt_3=list(prompts),
        do_classifier_free_guidance=False,
        max_sequence_length=text.T5_TOKENS,
    )
    return {"encoder_hidden_states": tokens.float(), "pooled_projections": pooled.float()}


@torch.no_grad()
def decode_latents(vae: AutoencoderKL, latents_BCHW: Tensor) -> Tensor:
    """Images in [0, 1]."""
    config = vae.config
    pictures = vae.decode(latents_BCHW / config["scaling_factor"] + config["shift_factor"]).sample
    return (pictures / 2 + 0.5).clamp(0, 1)


def evaluate(
    pipeline: StableDiffusion3Pipeline, prompts: Sequence[str], *, num_samples: int, num_steps: int, seed: int = 1234
) -> dict[str, float]:
    """`accuracy` of an SD3 checkpoint. Noise depends on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    sigmas = shifted_sigmas(num_steps, pipeline.scheduler.config["shift"])
    side, channels = pipeline.transformer.config["sample_size"], pipeline.transformer.config["in_channels"]

    def draw(batch: Sequence[str]) -> Tensor:
        noise = torch.randn(len(batch), channels, side, side, generator=generator)
        latents = euler_sample(pipeline.transformer, encode_prompts(pipeline, batch), noise, sigmas)
        return decode_latents(pipeline.vae, latents)

    return accuracy(draw, prompts, num_samples=num_samples)


def accuracy(draw: Callable[[Sequence[str]], Tensor], prompts: Sequence[str], *, num_samples: int) -> dict[str, float]:
    """See `unirl.pretraining.judging.accuracy`. The samples go round the prompts in order.

    draw(prompts) -> images [B, 3, 32, 32] in [0, 1].
    """
    chosen = [prompts[index % len(prompts)] for index in range(num_samples)]
    return judging.accuracy(
        lambda batch: score_shapes(draw(batch), batch), chosen, lambda prompt: parse_prompt(prompt).category, CATEGORIES
    )


def load(checkpoint: Path) -> StableDiffusion3Pipeline:
    """The stock pipeline of a folder, in float32."""
    return StableDiffusion3Pipeline.from_pretrained(checkpoint, torch_dtype=torch.float32)


def named_prompts() -> dict[str, list[str]]:
    """The prompts of RL and those held out."""
    return dict(zip(("train", "heldout"), world.split_prompts(), strict=True))


def main() -> None:
    """Log the accuracy of an SD3 checkpoint on the prompts of RL and on those held out."""
    judging.print_accuracy(load, evaluate, named_prompts(), __doc__)


if __name__ == "__main__":
    main()
