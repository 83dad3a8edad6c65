"""Blocks of LTX-2 whose gradient from video to sound is scaled. See `unirl.types.recipe`."""

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


RULES = (spans_lie_in_the_model,)
