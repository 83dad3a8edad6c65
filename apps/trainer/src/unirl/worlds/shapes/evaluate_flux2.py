"""Sample a FLUX.2 shapes checkpoint and judge it: `python -m unirl.worlds.shapes.evaluate_flux2 --checkpoint DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from torch import Tensor

from unirl.pretraining.judging import print_accuracy
from unirl.worlds.shapes import flux2_text, world
from unirl.worlds.shapes.evaluate import accuracy, named_prompts


def load(checkpoint: Path) -> Flux2KleinPipeline:
    """The stock pipeline of a folder, in float32."""
    pipeline = Flux2KleinPipeline.from_pretrained(checkpoint, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def evaluate(
    pipeline: Flux2KleinPipeline, prompts: Sequence[str], *, num_samples: int, num_steps: int, seed: int = 1234
) -> dict[str, float]:
    """`accuracy` of a FLUX.2 checkpoint, sampled by its stock pipeline. Noise depends on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)

    def draw(batch: Sequence[str]) -> Tensor:
        return pipeline(
            prompt=list(batch),
            height=world.IMAGE_SIDE,
            width=world.IMAGE_SIDE,
            guidance_scale=1.0,
            num_inference_steps=num_steps,
            max_sequence_length=flux2_text.TOKENS,
            generator=generator,
            output_type="pt",
        ).images

    return accuracy(draw, prompts, num_samples=num_samples)


def main() -> None:
    """Log the accuracy of a FLUX.2 checkpoint on the prompts of RL and on those held out."""
    print_accuracy(load, evaluate, named_prompts(), __doc__)


if __name__ == "__main__":
    main()
