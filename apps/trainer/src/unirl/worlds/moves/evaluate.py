"""Sample a moves checkpoint and judge it: `python -m unirl.worlds.moves.evaluate --checkpoint DIR [--steps 10]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from torch import Tensor

from unirl.models.diffusers_pipeline.normalisation import unstandardised
from unirl.pretraining.judging import accuracy, print_accuracy
from unirl.pretraining.sampling import euler_sample, shifted_sigmas
from unirl.reward.worlds.moves import score_moves
from unirl.reward.worlds.moves_grammar import CATEGORIES, parse_prompt
from unirl.worlds.moves import text, world


@torch.no_grad()
def encode_prompts(pipeline: WanPipeline, prompts: Sequence[str]) -> dict[str, Tensor]:
    """What the transformer reads of prompts, by keyword: by the pipeline's own method, at the world's token length."""
    tokens, _ = pipeline.encode_prompt(
        prompt=list(prompts), do_classifier_free_guidance=False, max_sequence_length=text.TOKENS
    )
    return {"encoder_hidden_states": tokens.float()}


@torch.no_grad()
def decode_latents(vae: AutoencoderKLWan, latents_BCFHW: Tensor) -> Tensor:
    """Videos [B, T, 3, H, W] in [0, 1]."""
    videos_BCTHW = vae.decode(unstandardised(latents_BCFHW, vae.config)).sample
    return (videos_BCTHW / 2 + 0.5).clamp(0, 1).transpose(1, 2)


def evaluate(
    pipeline: WanPipeline, prompts: Sequence[str], *, num_samples: int, num_steps: int, seed: int = 1234
) -> dict[str, float]:
    """See `unirl.pretraining.judging.accuracy`. The samples go round the prompts in order.

    Noise depends on `seed` alone.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = [prompts[index % len(prompts)] for index in range(num_samples)]
    sigmas = shifted_sigmas(num_steps, pipeline.scheduler.config["shift"])
    config = pipeline.vae.config
    side = world.IMAGE_SIDE // config["scale_factor_spatial"]
    shape = config["z_dim"], (world.NUM_FRAMES - 1) // config["scale_factor_temporal"] + 1, side, side

    def score(batch: Sequence[str]) -> tuple[Tensor, Tensor]:
        noise = torch.randn(len(batch), *shape, generator=generator)
        latents = euler_sample(pipeline.transformer, encode_prompts(pipeline, batch), noise, sigmas)
        return score_moves(list(decode_latents(pipeline.vae, latents)), batch)

    return accuracy(score, chosen, lambda prompt: parse_prompt(prompt).category, CATEGORIES)


def load(checkpoint: Path) -> WanPipeline:
    """The stock pipeline of a folder, in float32."""
    return WanPipeline.from_pretrained(checkpoint, torch_dtype=torch.float32)


def main() -> None:
    """Log the accuracy of a checkpoint on the prompts of RL and on those held out."""
    prompts = dict(zip(("train", "heldout"), world.split_prompts(), strict=True))
    print_accuracy(load, evaluate, prompts, __doc__)


if __name__ == "__main__":
    main()
