"""What training on trees needs of the sampling. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def trees_are_sampled(own: Part, run: Run) -> Messages:
    """There are trees, and every edge trains."""
    if run.sampling.get("branch_steps") is None:
        yield (
            f"{own.name} trains on trees, but sampling.branch_steps = null. Set sampling.branch_steps (stochastic "
            "steps) and sampling.branch_factors, whose product is sampling.samples_per_prompt."
        )
    fraction = own.number("step_fraction")
    if fraction is not None and fraction != 1:
        yield (
            f"{own.at}.step_fraction = {fraction}: samples that share a step cannot draw it each for themselves. Set "
            "it to 1, and make fewer steps stochastic by sampling.scheduler."
        )
    correction = own.inner.get("rollout_correction")
    if correction is not None and correction.get("level") != "token":
        yield f"{correction.at}.{SHARED_STEPS_ARE_WEIGHED_ALONE}"


SHARED_STEPS_ARE_WEIGHED_ALONE = (
    "level: samples share steps, so a weight of a whole trajectory would be several for one step. Set level: token."
)

RULES = (trees_are_sampled,)
