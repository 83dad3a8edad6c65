"""What LTX-2 can be told to do between video and sound: gradients that are scaled, attention that is noted. See
`unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.ltx2.released import RELEASED
from unirl.types.recipe import Messages, Part, Run

Span = tuple[int, int, float]
"""First and last block, counted from 0, and the scale of their gradient, in [0, 1]."""


def span_problem(spans: Sequence[Sequence[float]], num_blocks: int | None) -> str | None:
    """What is wrong with spans of blocks, for a message; None if nothing is. num_blocks: None if it is not known."""
    free = 0
    for span in spans:
        if len(span) != 3 or not all(isinstance(place, int) for place in span[:2]):
            return f"has {list(span)}, which is not [first block, last block, scale]. Write for example [0, 10, 0.1]"
        first, last, scale = span
        if not 0 <= scale <= 1:
            return f"scales the gradient of blocks {first} to {last} by {scale}. Set a scale from 0 to 1"
        if not free <= first <= last:
            return (
                f"has blocks {first} to {last} after block {free - 1}. Write spans from the first block to the last, "
                "none over another"
            )
        if num_blocks is not None and last >= num_blocks:
            return f"names block {last} of {num_blocks}, counted from 0. End at {num_blocks - 1}"
        free = int(last) + 1
    return None


def spans_lie_in_the_model(own: Part, run: Run) -> Messages:
    """Spans of blocks are in order, in the model, and their scales are from 0 to 1."""
    released = RELEASED.get(run.policy_of(own).bundle.node.get("pretrained_model", ""))
    problem = span_problem(own.get("audio_gradient") or (), None if released is None else released.blocks)
    if problem is not None:
        yield f"{own.at}.audio_gradient {problem}."


def window_problem(
    steps: Sequence[float] | None, blocks: Sequence[int] | None, num_blocks: int | None
) -> tuple[str, str] | None:
    """An option of those that note attention, and what is wrong with it, for a message; None if nothing is.

    steps, blocks: `region_steps` and `region_blocks` of `LTX2Pipeline`. num_blocks: None if it is not known.
    """
    if steps is None:
        if blocks is None:
            return None
        return "region_blocks", f"= {list(blocks)} does nothing without region_steps. Set region_steps: [0.5, 0.9]"
    if len(steps) != 2 or not 0 <= steps[0] <= steps[1] <= 1:
        return "region_steps", f"= {list(steps)} is not the first and the last share of the steps. Set [0.5, 0.9]"
    if blocks is None:
        return None
    if len(blocks) != 2 or not 0 <= blocks[0] <= blocks[1]:
        return "region_blocks", f"= {list(blocks)} is not the first and the last block. Set for example [10, 47]"
    if num_blocks is not None and blocks[1] >= num_blocks:
        return "region_blocks", f"names block {blocks[1]} of {num_blocks}, counted from 0. End at {num_blocks - 1}"
    return None


def steps_of(window: Sequence[float], num_steps: int) -> range:
    """The steps of a share of them, both ends included."""
    first, last = window
    return range(min(int(num_steps * first), num_steps - 1), min(int(num_steps * last), num_steps - 1) + 1)


def regions_are_noted_and_used(own: Part, run: Run) -> Messages:
    """Steps and blocks whose attention is noted are the model's, the engine keeps it, and an algorithm uses it."""
    policy, steps = run.policy_of(own), own.get("region_steps")
    released = RELEASED.get(policy.bundle.node.get("pretrained_model", ""))
    found = window_problem(steps, own.get("region_blocks"), None if released is None else released.blocks)
    if found is not None:
        yield f"{own.at}.{found[0]} {found[1]}."
    if steps is None:
        return
    said = f"{own.at}.region_steps = {list(steps)}"
    if not any(part.ability("takes_regions") and part.get("region_weight") != 1 for part in policy.algorithms.values()):
        names = ", ".join(part.at for part in policy.algorithms.values()) or "nothing"
        yield (
            f"{said} notes attention that {names} does not use. Set {own.at}.region_steps: null, or region_weight "
            "above 1 in an algorithm that has it (unirl.algorithms.omni_nft.OmniNFT)."
        )
    if not run.engine.ability("keeps_regions"):
        yield (
            f"{said} notes attention of this pipeline, and {run.engine.name} samples with another implementation. Set "
            f"{run.engine.at}._target_: unirl.rollout.engine.replica.engine.ReplicaRolloutEngine, or "
            f"{own.at}.region_steps: null."
        )
    if run.sampling.get("branch_steps") is not None:
        yield (
            f"{said} notes the attention of every sample, and {run.sampling.at}.branch_steps has samples share steps. "
            "Set one of them to null."
        )


RULES = (spans_lie_in_the_model, regions_are_noted_and_used)
