"""What a diffusion pipeline's kernel needs of the sampling. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run
from unirl.types.sampling_rules import last_step_is_stochastic


def eta_in_range(own: Part, run: Run) -> Messages:
    """The kernel can use this noise level."""
    kernel, eta = own.inner.get("strategy"), run.sampling.get("eta", 0.0)
    largest = None if kernel is None else kernel.ability("max_eta")
    if kernel is not None and largest is not None and eta > largest:
        yield (
            f"sampling.eta = {eta} must lie in [0, {largest:g}] for the {kernel.ability('name')} kernel. "
            "Change sampling.eta."
        )


def last_step_has_noise(own: Part, run: Run) -> Messages:
    """A kernel whose last step has no noise is not asked for its log-probability there."""
    kernel = own.inner.get("strategy")
    if kernel is not None and kernel.ability("takes_last_step") is False and last_step_is_stochastic(run.sampling):
        yield (
            f"the {kernel.ability('name')} kernel adds no noise on the last step, which then has no log-probability. "
            "Set sampling.scheduler to a window that ends earlier (unirl.sde.windows.AllSteps with exclude_last: true)."
        )


RULES = (eta_in_range, last_step_has_noise)
