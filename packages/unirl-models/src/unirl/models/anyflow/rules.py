"""What a model that makes videos chunk by chunk needs of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def transitions_are_trained(own: Part, run: Run) -> Messages:
    """Losses are those of sampled steps, whose velocity is averaged down to another level."""
    for algorithm in run.policy_of(own).algorithms.values():
        if not algorithm.takes_any and not algorithm.ability("requires_sde"):
            yield (
                f"{algorithm.name} trains the velocity at a noise level, given no earlier chunks, and {own.name} "
                "samples by average velocities between levels, chunk after chunk. Take an algorithm on stochastic "
                f"steps, such as {algorithm.at}._target_: unirl.algorithms.diffusion_grpo.DiffusionGRPO "
                "(parts/method/cm_grpo)."
            )


def videos_are_walked_alone(own: Part, run: Run) -> Messages:
    """Chunks after the first have no start in common, so nothing is shared between samples."""
    at = run.sampling.at
    if run.sampling.get("branch_steps") is not None:
        yield f"{own.name} makes each video alone. Remove {at}.branch_steps and {at}.branch_factors."
    if run.sampling.get("one_step") is not None:
        yield (
            f"{own.name} makes the same steps stochastic in all videos of a call, but {at}.one_step = "
            f"{run.sampling.get('one_step')}. Set it to null."
        )


def steps_are_eulers(own: Part, run: Run) -> Messages:
    """Average velocities end at the next level, and solvers combine those at levels."""
    asked = {f"{run.sampling.at}.post_solver": run.sampling.get("post_solver", "euler")}
    if run.evaluation is not None:
        asked["eval.post_solver"] = run.evaluation.get("post_solver", "euler")
    for at, solver in asked.items():
        if solver != "euler":
            yield (
                f"{at} = {solver}, but {own.name} steps by average velocities down to the next level. Set it to euler."
            )


RULES = (transitions_are_trained, videos_are_walked_alone, steps_are_eulers)
