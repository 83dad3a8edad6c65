"""Think, draw and judge: `python -m unirl.worlds.shapes.thoughts.evaluate --checkpoint DIR [--steps 10]`.

"plans" is the share of right ones among the plans that the images were drawn from, the most probable of each prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.pipeline import BagelPipeline, BagelTextPipeline
from unirl.pretraining.judging import print_accuracy
from unirl.reward.worlds.shapes_grammar import parse_prompt
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.media import Images, Texts
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams
from unirl.worlds.shapes import world
from unirl.worlds.shapes.evaluate import accuracy, named_prompts
from unirl.worlds.shapes.thoughts.plans import is_right

MAX_NEW_TOKENS = 24


def load(checkpoint: Path) -> BagelBundle:
    """The bundle of a folder, in float32."""
    return BagelBundle(str(checkpoint))


def evaluate(
    bundle: BagelBundle, prompts: Sequence[str], *, num_samples: int, num_steps: int, seed: int = 1234
) -> dict[str, float]:
    """`accuracy` of images of the most probable plan, and "plans". Noise depends on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    planner, painter = BagelTextPipeline(bundle), BagelPipeline(bundle, FlowSDEStrategy())
    writing = ARSamplingParams(temperature=0.0, max_new_tokens=MAX_NEW_TOKENS)
    drawing = DiffusionSamplingParams(
        height=world.IMAGE_SIDE,
        width=world.IMAGE_SIDE,
        num_inference_steps=num_steps,
        guidance_scale=1.0,
        eta=0.0,
        sde_indices=[],
        keep_latents="last",
        autocast_precision="fp32",
    )
    right: list[bool] = []

    def draw(batch: Sequence[str]) -> Tensor:
        asked = Texts(texts=list(batch))
        keys = [f"{len(right) + row}" for row in range(len(batch))]
        with planner.evaluating():
            plans = planner.decode(planner.generate(planner.encode({"text": asked}, writing), writing, noise_keys=keys))
        right.extend(is_right(plan, parse_prompt(prompt)) for plan, prompt in zip(plans.texts, batch, strict=True))
        conditions = painter.encode({"text": asked, "thought": plans}, drawing)
        start = torch.randn(len(batch), *painter.latent_shape(drawing), generator=generator)
        with painter.evaluating():
            segment = painter.diffuse(conditions, start, painter.sigmas(drawing), drawing, noise_keys=keys)
            pictures = painter.decode(segment.clean_latents, drawing)
        assert isinstance(pictures, Images)  # noqa: S101 - what BAGEL decodes
        return pictures.pixels

    found = accuracy(draw, prompts, num_samples=num_samples)
    return {**found, "plans": round(fmean(right), 3)}


def main() -> None:
    """Log the accuracy of a checkpoint on the prompts of RL and on those held out."""
    print_accuracy(load, evaluate, named_prompts(), __doc__)


if __name__ == "__main__":
    main()
