"""What images of tokens need of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run

ENGINE = "unirl.rollout.engine.trainside.image_tokens.TrainsideImageTokenEngine"


def images_are_drawn_by_tokens(own: Part, run: Run) -> Messages:
    """Sampling and engine are of images that the model that trains draws token by token."""
    for stage in run.stages:
        if run.all_policies[stage.policy].bundle is not own:
            continue
        if not stage.sampling.ability("samples_tokens"):
            yield (
                f"{own.name} draws images by tokens, but {stage.sampling.at}._target_ = {stage.sampling.path}. Set it "
                "to unirl.types.sampling.ARSamplingParams."
            )
        elif stage.engine.ability("has_own_weights"):
            yield (
                f"{own.name} draws images by a second head, with guidance, and {stage.engine.name} serves neither: its "
                f"samples are of the first. Set {stage.engine.at}._target_: {ENGINE}."
            )
        elif not stage.engine.ability("draws_by_tokens"):
            yield (
                f"{stage.engine.name} makes no images of the tokens that {own.name} draws. Set "
                f"{stage.engine.at}._target_: {ENGINE}."
            )


RULES = (images_are_drawn_by_tokens,)
