"""Converts recipes from before `stages`: an engine with two stages and the sampling parameters of both becomes two
stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.types.errors import ConfigError
from unirl.types.recipe import TARGET

Node = dict[str, Any]  # Any: a recipe's values

_ENGINE = "unirl.rollout.engine."
COMPOSED = f"{_ENGINE}composed.engine.ComposedEngine"
UNIFIED = f"{_ENGINE}unified.engine.UnifiedEngine"
SERVED = f"{_ENGINE}vllm_omni.unified.VLLMOmniUnifiedEngine"
TEXTS = f"{_ENGINE}trainside.text.TrainsideTextEngine"
IMAGES = f"{_ENGINE}trainside.engine.TrainsideRolloutEngine"
SERVED_IMAGES = f"{_ENGINE}vllm_omni.engine.VLLMOmniEngine"
READING = "unirl.rollout.stages.reading."
SAMPLING = "unirl.types.sampling.ComposedSamplingParams"
MODALITY = "unirl.trainer.composed.ComposedModality"


def to_stages(recipe: Node) -> list[str]:
    """Replace an engine of two stages by stages, in place; returns one line per change.

    Raises ConfigError if the recipe also has stages.
    """
    former = {"engine": (COMPOSED, UNIFIED, SERVED), "sampling": (SAMPLING,), "modality": (MODALITY,)}
    paths = {key: _path(recipe.get(key)) for key in former}
    old = {key: path for key, path in paths.items() if path in former[key]}
    if not old:
        return []
    if recipe.get("stages"):
        shown = ", ".join(f"{key}._target_ = {value}" for key, value in old.items())
        raise ConfigError(f"{shown}: `stages` replaces these, and both are given. Remove {', '.join(old)}.")
    if "engine" not in old or "sampling" not in old:
        return []  # an invalid mixture: `check` reports what is wrong
    make = _of_two_policies if old["engine"] == COMPOSED else _of_one_policy
    recipe["stages"] = make(recipe, recipe.pop("engine"), recipe.pop("sampling"))
    if "modality" in old:
        del recipe["modality"]
    lines = [f"engine._target_ = {old['engine']} with sampling.ar and sampling.diffusion are `stages` now."]
    evaluated = (recipe.get("eval") or {}).get("policy")
    if isinstance(evaluated, str) and "/" in evaluated:
        recipe["eval"]["policy"] = dict(word.split("/", 1) for word in evaluated.split(","))
        lines.append(f"eval.policy = {evaluated} is {recipe['eval']['policy']} now.")
    return lines


def _of_two_policies(recipe: Node, engine: Node, sampling: Node) -> Node:
    """Stages of two policies; each keeps its engine and sampling."""
    del sampling
    writer, painter = engine.get("writer", "writer"), engine.get("painter", "painter")
    tracks = {}
    for name, usual in ((writer, "text"), (painter, "image")):
        own = (recipe.get("policies") or {}).get(name) or {}
        tracks[name] = (own.get("engine") or {}).pop("track", usual)
    text: Node = {"policy": writer}
    if engine.get("instruction") is not None:
        text["reads"] = {TARGET: f"{READING}Instruction", "template": engine["instruction"]}
    options = {key: engine[key] for key in ("marker", "max_chars") if engine.get(key) is not None}
    image = {
        "policy": painter,
        "grows_from": tracks[writer],
        "reads": {TARGET: f"{READING}WrittenPrompt", **options},
    }
    return {tracks[writer]: text, tracks[painter]: image}


def _of_one_policy(recipe: Node, engine: Node, sampling: Node) -> Node:
    """Stages of one policy's pipelines, sampled by the trained model or, for images, by vLLM-Omni."""
    del recipe
    text, image = engine.get("tracks") or ("text", "image")
    known = (TARGET, "text_batch_size", "tracks")
    options = {key: value for key, value in engine.items() if key not in known}
    painting = SERVED_IMAGES if engine[TARGET] == SERVED else IMAGES
    return {
        text: {
            "engine": {TARGET: TEXTS, "forward_batch_size": engine.get("text_batch_size")},
            "sampling": sampling["ar"],
        },
        image: {
            "grows_from": text,
            "reads": {TARGET: f"{READING}Thought"},
            "engine": {TARGET: painting, **options},
            "sampling": sampling["diffusion"],
        },
    }


def _path(node: Any) -> str | None:  # Any: as in Node
    return str(node.get(TARGET)) if isinstance(node, Mapping) else None
