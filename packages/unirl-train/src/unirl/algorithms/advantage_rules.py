"""What advantages need of the groups that they compare. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.algorithms.advantage_presets import with_preset
from unirl.types.recipe import Messages, Part, Run


def groups_have_several(own: Part, run: Run) -> Messages:
    """A sample that is compared with its group is not alone in it."""
    if not own.ability("needs_groups") or with_preset(own).get("center", "group") != "group":
        return
    for view in run.views():
        algorithms = [part for policy in view.policies.values() for part in policy.algorithms.values()]
        makes_tokens = view.sampling.ability("samples_tokens")
        acts = view.sampling.ability("samples_actions")
        is_trained = any(
            (makes_tokens, acts) == (part.ability("trains_tokens"), part.ability("trains_actions"))
            for part in algorithms
        )
        if view.advantages is own and is_trained and view.sampling.get("samples_per_prompt", 1) == 1:
            yield (
                f"{view.sampling.at}.samples_per_prompt = 1: a group of one has no advantage, so nothing would be "
                "learnt. Set it to 2 or more."
            )


RULES = (groups_have_several,)
