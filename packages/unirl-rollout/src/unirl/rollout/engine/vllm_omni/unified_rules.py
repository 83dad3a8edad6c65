"""What a unified model drawn by vLLM-Omni needs of a recipe: the rules of both stages, and whole pushes."""

from __future__ import annotations

import dataclasses

from unirl.rollout.engine.child.rules import MACHINE_RULES
from unirl.rollout.engine.child.rules import RULES as OF_A_PROCESS
from unirl.rollout.engine.served_latents.rules import Rule, family_is_served, kernel_is_served, sampling_is_served
from unirl.rollout.engine.unified.rules import RULES as OF_TWO_TRACKS
from unirl.rollout.engine.vllm_omni.rules import KERNELS, pushes_are_whole
from unirl.types.recipe import Messages, Part, Run

__all__ = ["MACHINE_RULES", "RULES"]


def of_images(rule: Rule) -> Rule:
    """A rule of an engine of images, asked about the images of two stages."""

    def asked(own: Part, run: Run) -> Messages:
        images = run.sampling.inner.get("diffusion")
        if images is not None:
            yield from rule(own, dataclasses.replace(run, sampling=images))

    return asked


def images_have_one_size(own: Part, run: Run) -> Messages:
    """vLLM-Omni is asked for the recipe's size."""
    text, _ = own.get("tracks")
    writer = run.policy.pipelines.get(text)
    if writer is not None and writer.get("chooses_size", False):
        yield (
            f"pipelines.{text}.chooses_size: true, but {own.name} draws images of one size. Set "
            f"pipelines.{text}.chooses_size: false, or engine._target_: unirl.rollout.engine.unified.engine."
            "UnifiedEngine."
        )


RULES = (
    *OF_TWO_TRACKS,
    of_images(family_is_served(("BagelBundle", "HunyuanImage3Bundle"))),
    of_images(kernel_is_served(KERNELS)),
    of_images(sampling_is_served),
    pushes_are_whole,
    images_have_one_size,
    *OF_A_PROCESS,
)
