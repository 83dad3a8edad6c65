"""The scorers of a rehearsal: those that it can run, and what stands for the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unirl.app.memory import scorer_bytes
from unirl.config.runs import ComposedRun
from unirl.models.releases.contrastive import CLIP_MODELS
from unirl.models.releases.folder import write_configurations
from unirl.types.device_kinds import CPU
from unirl.types.devices import PRETEND
from unirl.types.recipe import Part

WITH_CLIP = "unirl.reward.local.images.clip.CLIPModelScorer"
OF_FRAMES = "unirl.reward.local.video.frames.FrameScorer"
"""Scorers that a rehearsal runs with their models, and one that asks them."""

Recipe = dict[str, Any]  # Any: a recipe's values


def scorers_of(run: ComposedRun, folder: Path) -> Iterator[tuple[str, Recipe]]:
    """Each scorer of a run by its name, the configurations of its models written to `folder`."""
    for name, part in run.reward.inner.items():
        own = name.rpartition(".")[2]
        if is_rehearsed(part, run):
            # It stays on the host, whose work counts where models compute there too.
            yield own, {**part.node, **({"device": PRETEND} if run.device == CPU else {})}
            continue
        scorer: Recipe = {
            "_target_": "unirl.app.rehearsal.scorer.DrawnScorer",
            "name": own,
            "batch_size": part.get("batch_size") or 8,
        }
        if computes(part):
            scorer["scorer"] = _computing(part, folder / own)
        else:
            scorer["num_bytes"] = scorer_bytes(part)
            if weights := part.get("component_weights"):
                scorer["component_weights"] = dict(weights)
        yield own, scorer


def note_of(run: ComposedRun) -> str:
    """What of scoring is not rehearsed."""
    parts = {name.rpartition(".")[2]: part for name, part in run.reward.inner.items()}
    known = [name for name, part in parts.items() if is_rehearsed(part, run)]
    drawn = f"scores other than of {', '.join(known)} are drawn" if known else "scores are drawn"
    computed = [name for name, part in parts.items() if computes(part)]
    models = f", whatever {', '.join(computed)} computes" if computed else ""
    others = [name for name, part in parts.items() if scorer_bytes(part) and name not in computed]
    counted = f"; {', '.join(others)} computes nothing, and its bytes are those of `check --memory`" if others else ""
    return f"{drawn}{models}{counted}"


def is_rehearsed(scorer: Part, run: ComposedRun) -> bool:
    """True if a rehearsal runs the scorer itself: one with gradients and no model, for the prompts that it knows."""
    has_prompts = Path(str(run.data.get("path"))).expanduser().exists()
    return has_prompts and scorer.abilities.get("is_differentiable") is True and not scorer_bytes(scorer)


def computes(scorer: Part) -> bool:
    """True if a rehearsal runs the scorer's models, whose configurations are known."""
    if OF_FRAMES in (scorer.path, *scorer.lineage):
        inner = scorer.inner.get("scorer")
        return inner is not None and computes(inner)
    if WITH_CLIP not in scorer.lineage or "device" in scorer.node:
        return False
    sources = (scorer.get("model"), scorer.get("processor") or scorer.get("model"))
    return all(source in CLIP_MODELS or Path(str(source)).is_dir() for source in sources)


def _computing(scorer: Part, folder: Path) -> Recipe:
    """The scorer on the pretend device, its models without weights."""
    node: Recipe = dict(scorer.node)
    if OF_FRAMES in (scorer.path, *scorer.lineage):
        return {**node, "scorer": _computing(scorer.inner["scorer"], folder)}
    for option in ("model", "processor"):
        source = scorer.get(option)
        if source in CLIP_MODELS:
            write_configurations(source, folder / option)
            node[option] = str(folder / option)
    if "checkpoint" in scorer.keywords:
        node["checkpoint"] = None  # the model itself has the weights' shapes
    return {**node, "device": PRETEND}
