"""What a diffusion pipeline's kernel needs of the sampling. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def eta_in_range(own: Part, run: Run) -> Messages:
    """The kernel can use this noise level."""
    kernel, eta = own.inner.get("strategy"), run.sampling.get("eta", 0.0)
    largest = None if kernel is None else kernel.ability("max_eta")
    if kernel is not None and largest is not None and eta > largest:
        yield (
            f"sampling.eta = {eta} must lie in [0, {largest:g}] for the {kernel.ability('name')} kernel. "
            "Change sampling.eta."
        )


RULES = (eta_in_range,)
