"""Rules of engines that sample texts in other processes. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def model_is_served(own: Part, run: Run) -> Messages:
    """The engine loads what is pushed to it: not the Thinker of a whole Qwen3-Omni."""
    bundle = run.policy.bundle
    if "Qwen3OmniThinkerBundle" in bundle.class_names:
        yield (
            f"{own.name} does not serve {bundle.name}: it loads the whole Qwen3-Omni, which a push of the Thinker's "
            "weights does not fit, and is given no sounds. Sample with the model that trains "
            "(parts/engine=text_trainside) or a copy of it (parts/engine=text_replica)."
        )
