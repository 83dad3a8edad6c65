"""What an engine of a unified model needs of a recipe: one policy with two pipelines, rewards on the images."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def one_policy_has_both(own: Part, run: Run) -> Messages:
    """There is one policy, and a pipeline for each track."""
    if len(run.all_policies) > 1:
        yield (
            f"{own.name} samples one policy, this recipe has {', '.join(run.all_policies)}. Set engine._target_: "
            "unirl.rollout.engine.composed.engine.ComposedEngine, or remove the others."
        )
        return
    text, image = _tracks(own)
    missing = [name for name in (text, image) if name not in run.policy.pipelines]
    if missing:
        there = ", ".join(run.policy.pipelines)
        yield f"{own.name} samples the pipelines {text} and {image}, there is {there}. Add pipelines.{missing[0]}."
    if run.sampling.ability("root_stage") is None:
        yield (
            f"{own.name} makes texts and images, but sampling._target_ = {run.sampling.path}. Set it to "
            "unirl.types.sampling.ComposedSamplingParams, with ar and diffusion."
        )


def images_are_scored(own: Part, run: Run) -> Messages:
    """Rewards are of the images, from which the texts are credited."""
    _, image = _tracks(own)
    if run.scored_track != image:
        shown = "null, the texts" if run.scored_track is None else run.scored_track
        yield f"reward.track = {shown}, but the track of the images is {image}. Set reward.track: {image}."


def sizes_suit_devices(own: Part, run: Run) -> Messages:
    """Images that choose their size are as many forwards as there are sizes, and devices run equally many."""
    text, image = _tracks(own)
    chooses = text in run.policy.pipelines and run.policy.pipelines[text].get("chooses_size", False)
    if not chooses or run.num_devices == 1:
        return
    losses = run.policy.stack.get("losses") or {}
    micro = (losses.get(image) or {}).get("micro_batch_size") or run.policy.stack.get("micro_batch_size")
    sizes = {f"{own.at}.forward_batch_size": own.get("forward_batch_size"), "stack.micro_batch_size": micro}
    for name, value in sizes.items():
        if value != 1:
            yield (
                f"pipelines.{text}.chooses_size gives images of one batch different sizes, one forward each, and "
                f"{run.num_devices} devices must run equally many: {name} = {value} must be 1. Set {name}: 1, or "
                f"pipelines.{text}.chooses_size: false."
            )


def _tracks(own: Part) -> tuple[str, str]:
    text, image = own.get("tracks")
    return text, image


RULES = (one_policy_has_both, images_are_scored, sizes_suit_devices)
