"""What algorithms on the forward process need of the schedule. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def levels_exist(own: Part, run: Run) -> Messages:
    """An algorithm that draws noise levels from the rollout finds enough."""
    wanted, steps = own.node.get("num_timesteps"), run.sampling.get("num_inference_steps", 1)
    if wanted is not None and own.node.get("timestep_sampler", "rollout") == "rollout" and wanted > steps:
        yield (
            f"{own.at}.num_timesteps = {wanted} exceeds sampling.num_inference_steps = {steps}. "
            "Lower the first or raise the second."
        )


def levels_are_the_models(own: Part, run: Run) -> Messages:
    """A model of integer timesteps is trained at its own levels."""
    policy, sampler = run.policy_of(own), own.node.get("timestep_sampler", "rollout")
    track = next(name for name, part in policy.algorithms.items() if part is own)
    pipeline = policy.pipeline_of(track)
    if sampler != "rollout" and pipeline.ability("takes_any_sigma") is False:
        yield (
            f"{own.at}.timestep_sampler = {sampler} draws any noise level, but {pipeline.name} knows those of its "
            f"timesteps alone. Set {own.at}.timestep_sampler: rollout."
        )


RULES = (levels_exist, levels_are_the_models)
