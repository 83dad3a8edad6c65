"""What advantages need of the groups that they compare. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def groups_have_several(own: Part, run: Run) -> Messages:
    """A sample that is compared with its group is not alone in it."""
    repeats = run.sampling.get("samples_per_prompt", 1)
    if repeats == 1 and own.ability("needs_groups") and own.node.get("center", "group") == "group":
        yield (
            "sampling.samples_per_prompt = 1: a group of one has no advantage, so nothing would be learnt. "
            "Set it to 2 or more."
        )


RULES = (groups_have_several,)
