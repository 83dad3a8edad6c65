"""What a correction for older policies needs of its own values, of the anchor and of the engine.

See `unirl.types.recipe`; the rules are asked with the algorithm that holds the correction.
"""

from __future__ import annotations

import math

from unirl.types.recipe import Messages, Part, Run

LOG_LINEAR_REPLAYS_NOTHING = (
    "needs a replay before the first update, which old_logp_source = log-linear saves. Set old_logp_source: replay."
)


def unusable_bounds(
    at: str, mode: str, lower: float | None, upper: float | None, *, masks: bool, drops: bool
) -> str | None:
    """What is wrong with the bounds of weights; None where nothing is.

    masks: whether M2PO's mask bounds them too. drops: whether stale samples or their late steps are left out.
    """
    low, high = lower or 0.0, math.inf if upper is None else upper
    shown = f"lower = {'null' if lower is None else lower}, upper = {'null' if upper is None else upper}"
    if not 0 <= low <= 1 <= high:
        return f"{at} needs 0 <= lower <= 1 <= upper; got {shown}"
    if lower is None and upper is None and not masks:
        return (
            f"{at} needs at least one bound; got {shown}. Set upper (2.0 is usual for tokens), m2_threshold, or lower: "
            "0 for weights as they are."
        )
    if mode == "reject" and low == 0 and upper is None and not (masks or drops):
        return f"{at}.mode = reject with {shown} weighs everything 1. Set upper, or lower above 0, or mode: truncate."
    return None


def correction_has_its_bounds(own: Part, run: Run) -> Messages:
    """The weights are bounded somewhere, and do something."""
    correction = own.inner.get("rollout_correction")
    if correction is None:
        return
    problem = unusable_bounds(
        correction.at,
        correction.get("mode", "truncate"),
        correction.get("lower"),
        correction.get("upper"),
        masks=correction.get("m2_threshold") is not None,
        drops=any(correction.get(key) is not None for key in ("max_staleness", "noise_floor")),
    )
    if problem is not None:
        yield problem


def correction_compares_two(own: Part, run: Run) -> Messages:
    """The correction for the gap to the engine has a replay and the engine's log-probs to compare."""
    if not own.get("rollout_correction"):
        return
    if own.get("old_logp_source") == "rollout":
        yield (
            f"{own.at}.rollout_correction compares a replay with the rollout, but {own.at}.old_logp_source = rollout. "
            "Set old_logp_source: replay."
        )
    if not run.engine.ability("gives_logp"):
        yield (
            f"{own.at}.rollout_correction compares a replay with the rollout, but {run.engine.name} returns no "
            "log-probs. Set rollout_correction: null."
        )


def log_linear_needs_no_replay(own: Part, run: Run) -> Messages:
    """Where the old log-probs are approximated from those of the rollout, nothing else is asked of a replay."""
    if own.get("old_logp_source") != "log-linear":
        return
    if own.ability("freezes_fields"):
        yield f"{own.name} {LOG_LINEAR_REPLAYS_NOTHING}"
    correction = own.inner.get("rollout_correction")
    if correction is not None and correction.get("m2_threshold") is not None:
        yield f"{correction.at}.m2_threshold {LOG_LINEAR_REPLAYS_NOTHING}"


RULES = (correction_has_its_bounds, correction_compares_two, log_linear_needs_no_replay)
