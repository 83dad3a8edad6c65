"""Recipe rules of all that plays episodes in an environment. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def ranks_have_their_own_episodes(own: Part, run: Run) -> Messages:
    """Ranks that work on the same samples would each ask the environment."""
    for policy in run.policies.values():
        if policy.ranks_per_sample > 1:
            yield (
                f"{policy.prefix}backend.{policy.sharing} with {own.at}: ranks that share "
                "samples would each play their episodes. Set it to 1."
            )


def failed_episodes_are_dropped(own: Part, run: Run) -> Messages:
    """An episode whose environment fails has no reward, however often it is scored."""
    if run.reward.get("on_failure") == "retry":
        yield (
            f"reward.on_failure: retry would score an episode again whose environment ({own.at}) has "
            "failed, to no avail. Set drop_group, or raise to stop at the first."
        )


RULES = (ranks_have_their_own_episodes, failed_episodes_are_dropped)
