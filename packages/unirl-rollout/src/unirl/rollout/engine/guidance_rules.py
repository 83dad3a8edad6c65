"""What an engine that drops prompts needs, said alike by the check and by the engine. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run

DROPOUT = "prompt_dropout"


def dropout_problem(share: float, negative_prompt: str | None, distilled_guidance: float | None) -> str | None:
    """Why prompts cannot be dropped, or None. What replaces them is what guidance compares with."""
    if distilled_guidance is not None:
        return (
            f"{DROPOUT} = {share:g} trains what guidance by a second forward compares with, and this model takes its "
            f"guidance as an input (sampling.distilled_guidance_scale = {distilled_guidance:g}). Set it to 0."
        )
    if negative_prompt is None:
        return (
            f"{DROPOUT} = {share:g} replaces prompts by sampling.negative_prompt, which is null. Set it (the empty "
            f'string "" is a valid one), or {DROPOUT}: 0.'
        )
    return None


def dropped_prompts_have_a_negative_one(own: Part, run: Run) -> Messages:
    """`dropout_problem` of the recipe."""
    share, sampling = own.get(DROPOUT, 0.0), run.sampling.node
    if share:
        problem = dropout_problem(share, sampling.get("negative_prompt"), sampling.get("distilled_guidance_scale"))
        if problem is not None:
            yield f"{own.at}.{problem}"
