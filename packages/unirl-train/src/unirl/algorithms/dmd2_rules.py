"""What DMD2 needs of the model, the trajectory and the teacher's guidance. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.algorithms.teacher_rules import latents_are_kept
from unirl.types.recipe import Messages, Part, Run
from unirl.types.sampling_rules import no_stochastic_steps


def levels_are_in_order(own: Part, run: Run) -> Messages:
    """Noise levels are drawn from an interval."""
    yield from is_below_max_level(own, "min_level")


def is_below_max_level(own: Part, option: str) -> Messages:
    """The least of some noise levels, `option`, is less than the greatest of all."""
    low, high = own.get(option), own.get("max_level")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low >= high:
        yield f"{own.at}.{option} = {low} must be below {own.at}.max_level = {high}. Lower the first."


def scores_are_asked_anywhere(own: Part, run: Run) -> Messages:
    """Both scores are asked at any noise level, by the velocity of a flow."""
    policy = run.policy_of(own)
    track = next(name for name, part in policy.algorithms.items() if part is own)
    pipeline = policy.pipeline_of(track)
    if pipeline.ability("takes_any_sigma") is False:
        yield (
            f"{own.name} compares velocities at any noise level, but {pipeline.name} knows those of its timesteps "
            "alone. Take a model that is trained by flow matching."
        )


def next_latents_are_the_students(own: Part, run: Run) -> Messages:
    """Matching along the trajectory is of deterministic Euler steps, and nothing else draws levels of steps."""
    matching, levels = own.get("matching", "samples"), own.get("trajectory_levels", "step")
    if matching != "trajectory":
        if levels != "step":
            yield (
                f"{own.at}.trajectory_levels = {levels} does nothing with {own.at}.matching = {matching}. Remove it, "
                f"or set {own.at}.matching: trajectory."
            )
        return
    if no_stochastic_steps(run.sampling) is None:
        yield (
            f"{own.at}.matching = trajectory noises where a deterministic step ends. Set sampling.eta: 0 (and "
            f"scheduler: null), or {own.at}.matching: samples."
        )
    solver = run.sampling.get("post_solver", "euler")
    if solver != "euler":
        yield (
            f"{own.at}.matching = trajectory noises where an Euler step ends, not one of sampling.post_solver = "
            f"{solver}. Set post_solver: euler, or {own.at}.matching: samples."
        )


def teacher_can_be_guided(own: Part, run: Run) -> Messages:
    """A guided teacher reads a negative prompt."""
    yield from negative_prompt_is_there(own, run, "teacher_guidance")


def negative_prompt_is_there(own: Part, run: Run, option: str) -> Messages:
    """What is guided by the scale `option` reads a negative prompt, which is encoded while training."""
    scale = own.get(option)
    if not isinstance(scale, (int, float)) or scale <= 1 or run.sampling.get("guidance_scale", 1.0) > 1:
        return
    if run.sampling.node.get("negative_prompt") is None:
        yield (
            f"{own.at}.{option} = {scale} needs a negative prompt. Set sampling.negative_prompt (the empty "
            f'string "" is a valid one), or {own.at}.{option}: 1.'
        )
    if run.engine.get("drop_text_encoders"):
        yield (
            f"{own.at}.{option} = {scale} has the trainer encode the negative prompt, but "
            f"{run.engine.at}.drop_text_encoders: true frees what does. Remove it, or set {own.at}.{option}: 1."
        )


RULES = (
    levels_are_in_order,
    scores_are_asked_anywhere,
    next_latents_are_the_students,
    teacher_can_be_guided,
    latents_are_kept,
)
