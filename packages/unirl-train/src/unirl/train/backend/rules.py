"""What the training backend needs of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.algorithms.rules import needs_reference
from unirl.types.recipe import Messages, Part, Run


def device_options_fit(own: Part, run: Run) -> Messages:
    """No option of another device."""
    if run.device == "cpu" and (own.get("fsdp") or {}).get("cpu_offload"):
        yield f"{own.at}.fsdp.cpu_offload does nothing with device: cpu. Remove it."


def kept_reference_has_a_use(own: Part, run: Run) -> Messages:
    """A second copy of the weights is kept where something compares with it, and where there is no other reference."""
    if not own.get("keep_reference"):
        return
    algorithms = run.policy_of(own).algorithms.values()
    is_evaluated = run.evaluation is not None and run.evaluation.get("policy") == "reference"
    if own.get("lora") is not None:
        yield (
            f"{own.at}.keep_reference: true keeps a second copy of the weights, but with {own.at}.lora the frozen "
            "weights are the reference. Set keep_reference: false, or lora: null."
        )
    elif not is_evaluated and all(needs_reference(algorithm) is None for algorithm in algorithms):
        at = next(algorithm.at for algorithm in algorithms)
        yield f"{own.at}.keep_reference: true does nothing with {at}.kl_coef = 0. Remove it."


RULES = (device_options_fit, kept_reference_has_a_use)
