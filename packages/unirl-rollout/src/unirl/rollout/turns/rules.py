"""Recipe rules of turns. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def texts_take_turns(own: Part, run: Run) -> Messages:
    """Only texts have turns."""
    for stage in run.stages:
        if stage.turns is own and not stage.sampling.ability("samples_tokens"):
            yield f"{own.at}: {stage.engine.name} samples no texts, and only these take turns. Remove {own.at}."


def ranks_have_their_own_samples(own: Part, run: Run) -> Messages:
    """Ranks that work on the same samples would each ask the environment."""
    for policy in run.policies.values():
        if policy.ranks_per_sample > 1:
            yield (
                f"{own.at} with {policy.prefix}backend.topology.sp = {policy.ranks_per_sample}: ranks that share "
                "samples would each play their episodes. Set sp: 1."
            )


def failed_episodes_are_dropped(own: Part, run: Run) -> Messages:
    """An episode whose environment fails has no reward, which must not end the run unless that is wanted."""
    if run.reward.get("on_failure") == "retry":
        yield (
            f"reward.on_failure: retry would score an episode again whose environment ({own.at}) has failed, to no "
            "avail. Set drop_group, or raise to stop at the first."
        )


def lengths_are_of_turns(own: Part, run: Run) -> Messages:
    """The soft punishment of overlong answers counts the tokens of a sample against the limit of one turn."""
    if run.reward.get("truncated_reward") == "soft":
        yield (
            f"reward.truncated_reward: soft measures whole samples by sampling.max_new_tokens, which with {own.at} is "
            "the limit of one turn. Set keep or zero."
        )


RULES = (lengths_are_of_turns, texts_take_turns, ranks_have_their_own_samples, failed_episodes_are_dropped)
