"""What a MiniMax-H3 makes: videos of the lengths that it was trained on, without guidance. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.models.guidance_rules import no_guidance
from unirl.types.recipe import Messages, Part, Run

FPS = 24
"""Frames per second of all its videos."""
CHUNK, REST = 17, 5
"""Frames of a released video are CHUNK k + REST."""


def seconds_problem(num_frames: int, shortest_s: float, longest_s: float) -> str | None:
    """What is wrong with the length of a video, for a message; None if nothing is."""
    if shortest_s <= num_frames / FPS <= longest_s:
        return None
    first = -(-(shortest_s * FPS - REST) // CHUNK) * CHUNK + REST
    last = (longest_s * FPS - REST) // CHUNK * CHUNK + REST
    return (
        f"num_frames = {num_frames} are {num_frames / FPS:.1f} s; MiniMax-H3 was trained on videos of {shortest_s:g} "
        f"to {longest_s:g} s. Use num_frames = {max(first, CHUNK + REST):.0f} to {last:.0f}, or set bundle.shortest_s "
        "and bundle.longest_s for a checkpoint that was trained on others."
    )


def length_is_trained(own: Part, run: Run) -> Messages:
    """Videos are as long as those that the checkpoint was trained on."""
    num_frames = run.sampling.node.get("num_frames", 1)
    if isinstance(num_frames, int):
        problem = seconds_problem(num_frames, own.get("shortest_s"), own.get("longest_s"))
        if problem is not None:
            yield f"sampling: {problem}"


def guidance_is_distilled(own: Part, run: Run) -> Messages:
    """No second forward without the prompt."""
    yield from no_guidance(own, run, "another model")


RULES = (length_is_trained, guidance_is_distilled)
