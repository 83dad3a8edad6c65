"""What the heads of policies that act need of the sampling. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Mapping

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


def noise_is_learned_where_it_is_taken(own: Part, run: Run) -> Messages:
    """A network of deviations is there exactly if the pipeline takes them. What a checkpoint holds is seen later."""
    bundle = run.policy_of(own).bundle
    config = bundle.node.get("config")
    given = bundle.node.get("noise_range")
    if given is None and isinstance(config, Mapping):
        given = config.get("noise_range")
    if own.ability("learns_noise"):
        if given is None and config is not None:
            yield f"{own.name} takes learned noise, but {bundle.at}.noise_range is missing. Set it to [0.08, 0.16]."
    elif given is not None:
        yield (
            f"{bundle.at}.noise_range = {list(given)} does nothing with {own.name}. Remove it, or set "
            f"{own.at}._target_: unirl.models.action.noise_pipeline.FlowNoiseActionPipeline."
        )


RULES = (options_fit_the_head, samples_have_log_probs, noise_is_learned_where_it_is_taken)
