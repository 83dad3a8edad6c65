"""Guidance that a checkpoint takes: as an input of the model, by a second forward, or neither.

What a family's rules and its adapter say alike. Imports no heavy library, see `unirl.types.recipe`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl.types.recipe import Messages, Part, Run


def input_problem(scale: float | None, checkpoint: str, *, takes: bool, released: float) -> str | None:
    """What is wrong with `distilled_guidance_scale`, or None.

    takes: whether the model embeds it. released: the scale that the checkpoint was published with.
    """
    if takes and scale is None:
        return (
            f"{checkpoint} takes its guidance as an input. Set sampling.distilled_guidance_scale (released with "
            f"{released:g}; a model that is trained without guidance takes 1)."
        )
    if not takes and scale is not None:
        return (
            f"distilled_guidance_scale = {scale} means nothing to {checkpoint}, which embeds no guidance. Set "
            "sampling.distilled_guidance_scale: null."
        )
    return None


def guidance_problem(scale: float, negative_prompt: str | None, checkpoint: str, instead: str) -> str | None:
    """Why a checkpoint that samples without guidance cannot follow these, or None.

    instead: which checkpoint to use for guidance.
    """
    if scale <= 1 and not negative_prompt:
        return None
    return (
        f"{checkpoint} is distilled to sample without guidance; got guidance_scale = {scale}, negative_prompt = "
        f"{negative_prompt!r}. Set guidance_scale: 1 and negative_prompt: null, or use {instead}."
    )


def inputs_of(own: Part, run: Run, *, takes: bool) -> Messages:
    """`input_problem` of what is sampled and evaluated. The class of the bundle declares `released_guidance`."""
    for at, values in _samplings(run):
        problem = input_problem(
            values["distilled_guidance_scale"], _name(own), takes=takes, released=own.ability("released_guidance")
        )
        if problem is not None:
            yield f"{at}: {problem}"
            return


def no_guidance(own: Part, run: Run, instead: str) -> Messages:
    """`guidance_problem` of what is sampled and evaluated."""
    for at, values in _samplings(run):
        problem = guidance_problem(values["guidance_scale"], values["negative_prompt"], _name(own), instead)
        if problem is not None:
            yield f"{at}: {problem}"
            return
    if dropped := run.engine.get("prompt_dropout", 0.0):
        yield (
            f"{run.engine.at}.prompt_dropout = {dropped}: {_name(own)} is distilled to sample without guidance, so "
            f"nothing compares with dropped prompts. Set it to 0, or use {instead}."
        )


def folder_value(own: Part, file: str, key: str) -> Any:  # Any: a JSON value
    """A setting of the checkpoint where its folder lies on this machine and says it, else None."""
    model = own.node.get("pretrained_model")
    if model is None:
        return None
    try:
        settings = json.loads((Path(str(model)).expanduser() / file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # a hub id, or a folder that `unirl.models.rules.model_exists` judges
    return settings.get(key) if isinstance(settings, dict) else None


def _samplings(run: Run) -> Iterator[tuple[str, Mapping[str, Any]]]:  # Any: a recipe's values
    """Each section with sampling parameters, and its guidance; an evaluation only if it sets guidance itself."""
    own = {
        "guidance_scale": run.sampling.get("guidance_scale", 1.0),
        "negative_prompt": run.sampling.node.get("negative_prompt"),
        "distilled_guidance_scale": run.sampling.node.get("distilled_guidance_scale"),
    }
    yield "sampling", own
    if run.evaluation is None:
        return
    evaluated = {name: value for name in own if (value := run.evaluation.node.get(name)) is not None}
    if evaluated:
        yield "eval", {**own, **evaluated}


def _name(own: Part) -> str:
    return str(own.node.get("pretrained_model", own.name))
