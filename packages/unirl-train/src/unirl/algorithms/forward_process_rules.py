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


RULES = (levels_exist,)
