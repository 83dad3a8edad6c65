"""What a reward service needs: scorers, and one weight each. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.types.recipe import Messages, Part, Run


def weights_name_scorers(own: Part, run: Run) -> Messages:
    """Reward weights and scorers have the same names."""
    scorers, weights = own.node.get("scorers"), own.node.get("weights")
    if isinstance(scorers, Mapping) and scorers and not any(scorers.values()):
        yield f"reward.scorers is empty: null takes {', '.join(map(str, scorers))} out. Name at least one scorer."
    elif not scorers:
        yield "reward.scorers is empty. Name at least one scorer."
    elif isinstance(scorers, Mapping) and isinstance(weights, Mapping) and set(weights) != set(scorers):
        gone = sorted(set(weights) - set(scorers))
        hint = f" A weight goes with its scorer: reward.weights.{gone[0]}: null takes it out." if gone else ""
        yield (
            f"reward.weights names {sorted(weights)}, reward.scorers {sorted(scorers)}. Give each scorer one weight."
            f"{hint}"
        )


RULES = (weights_name_scorers,)
