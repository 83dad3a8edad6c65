"""What the heads of policies that act need of the sampling. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run

OF_FLOW = ("num_inference_steps", "eta", "sde_indices")
OF_BINS = ("temperature",)


def options_fit_the_head(own: Part, run: Run) -> Messages:
    """Every option of the sampling is one of this head."""
    others, head = (OF_BINS, "flow") if own.ability("head") == "flow" else (OF_FLOW, "bins")
    for name in others:
        if run.sampling.node.get(name) is not None:
            yield f"{run.sampling.at}.{name} does nothing with {own.name}, whose head is {head}. Remove it."


def samples_have_log_probs(own: Part, run: Run) -> Messages:
    """What trains was drawn from a distribution."""
    if not run.policy.trains:
        return
    if own.ability("head") == "bins":
        if run.sampling.get("temperature") == 0:
            yield f"{run.sampling.at}.temperature = 0 takes the most probable bins, which nothing trains on. Raise it."
    elif run.sampling.get("eta") == 0 or run.sampling.get("sde_indices") == []:
        yield (
            f"{run.sampling.at}.eta = {run.sampling.get('eta')} and sde_indices = {run.sampling.get('sde_indices')} "
            "leave no stochastic step, which alone can be trained on. Set eta above 0 and sde_indices: null."
        )


RULES = (options_fit_the_head, samples_have_log_probs)
