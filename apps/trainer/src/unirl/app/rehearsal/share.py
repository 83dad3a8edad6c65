"""The recipe of one rank: what a rehearsal runs in one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unirl.app.memory import scorer_bytes, trained_steps
from unirl.config.check import check_recipe
from unirl.config.placement import groups_of_run
from unirl.config.runs import ComposedRun
from unirl.models.releases.folder import is_known, write_configurations
from unirl.types.devices import PRETEND
from unirl.types.errors import ConfigError

PROMPTS = [f"a picture of {number} red kites over a grey sea, seen from a small boat" for number in range(64)]
MICRO_BATCHES = 2
"""Micro-batches of an update: the second one has gradients in memory, and those after it are like it."""

NOTES = (
    "scores are drawn; the bytes of reward models are those of `check --memory`",
    "the evaluation is left out",
)

Recipe = dict[str, Any]  # Any: a recipe's values


@dataclass(frozen=True)
class Share:
    """What one rank does of a recipe's step, and how much of it is rehearsed."""

    run: ComposedRun
    """The run of one process, on the pretend device."""
    num_ranks: int
    """Ranks of the group that trains."""
    num_samples: int
    """Samples of this rank in a rollout of the recipe."""
    num_made: int
    """Samples that are made, as many as one forward of the rollout takes; the others are added to what memory holds."""
    num_trained: int
    """Samples that are trained on, the first micro-batches of every update."""
    pushes: bool
    """True if weights are gathered for an engine."""
    notes: tuple[str, ...]
    """What is not rehearsed, or is taken from a formula."""


def share_of(run: ComposedRun, folder: Path) -> Share:
    """One rank's share of a run, its models' configurations and prompts written to `folder`.

    Raises ConfigError for a recipe that cannot be rehearsed, with the reason.
    """
    recipe: Recipe = copy.deepcopy(dict(run.resolved))
    train = groups_of_run(run)[0]
    num_ranks = len(train.devices)
    for stage in run.stages:
        if stage.sampling.get("height") is None:
            raise ConfigError(
                f"{stage.at} makes texts, whose ends depend on values; only images and videos are rehearsed yet."
            )
        if stage.at not in train.holds:
            raise ConfigError(
                f"{stage.at} samples on other devices than those that train, which is not rehearsed yet. Rehearse the "
                "trainer alone with parts/layout=together."
            )
        if stage.engine.ability("has_own_weights"):
            raise ConfigError(f"{stage.engine.name} is another process, which cannot be rehearsed.")
    batch = _batch(run, num_ranks)
    recipe.update(
        runtime="local",
        num_devices=1,
        batch_size=batch.prompts,
        num_rollouts=2,
        max_cpu_s=None,
        eval=None,
        trackers={},
        guardrails={"action": "off"},
        placement={},
        pools={},
        save={"interval": 0},
        media_interval=0,
        run_dir=None,
        resume=None,
    )
    recipe["reward"] = {"_target_": "unirl.reward.service.RewardService", "scorers": dict(_scorers(run))}
    if weights := run.resolved["reward"].get("weights"):
        recipe["reward"]["weights"] = weights
    folder.mkdir(parents=True, exist_ok=True)
    _write_prompts(recipe, folder)
    for at, bundle in _bundles(recipe):
        source = bundle.get("pretrained_model")
        if not Path(str(source)).is_dir():
            if not is_known(str(source)):
                raise ConfigError(f"{at}.pretrained_model = {source}: the configurations of this model are not known.")
            place = folder / at
            write_configurations(str(source), place)
            bundle["pretrained_model"] = str(place)
    # The true run has passed the rules between sections; one device alone would not, with a topology of several.
    small = check_recipe(recipe, is_exported=True)
    return Share(
        run=replace(small, device=PRETEND),
        num_ranks=num_ranks,
        num_samples=batch.num_samples,
        num_made=batch.num_made,
        num_trained=batch.num_trained,
        pushes=any(policy.sync is not None for policy in run.policies.values()),
        notes=NOTES,
    )


@dataclass(frozen=True)
class _Batch:
    prompts: int
    num_samples: int
    num_made: int
    num_trained: int


def _batch(run: ComposedRun, num_ranks: int) -> _Batch:
    """Whole groups that fill one forward of the rollout and the first micro-batches of every update."""
    per_prompt = run.sampling.get("samples_per_prompt", 1)
    num_samples = run.batch_size * per_prompt * run.policy.ranks_per_sample // num_ranks
    stack = run.policy.stack
    updates, micro = stack.get("num_updates_per_batch", 1), stack.get("micro_batch_size", 1)
    algorithm = next(iter(run.policy.algorithms.values()))
    parts = micro * trained_steps(run) // (algorithm.get("rows_per_forward") or micro * trained_steps(run))
    # Several backward passes of one micro-batch show the same as several micro-batches.
    trained = min(num_samples, updates * micro * (1 if parts > MICRO_BATCHES else MICRO_BATCHES))
    wanted = max(trained, min(num_samples, run.engine.get("forward_batch_size") or num_samples))
    prompts = max(1, -(-wanted // per_prompt))
    while prompts * per_prompt % updates:
        prompts += 1
    return _Batch(prompts, num_samples, prompts * per_prompt, trained)


def _scorers(run: ComposedRun) -> Iterator[tuple[str, Recipe]]:
    for name, part in run.reward.inner.items():
        own = name.rpartition(".")[2]
        scorer: Recipe = {
            "_target_": "unirl.app.rehearsal.scorer.DrawnScorer",
            "name": own,
            "batch_size": part.get("batch_size") or 8,
            "num_bytes": scorer_bytes(part),
        }
        if weights := part.get("component_weights"):
            scorer["component_weights"] = dict(weights)
        yield own, scorer


def _bundles(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Every bundle of the recipe by its place."""
    if recipe.get("bundle"):
        yield "bundle", recipe["bundle"]
    for name, sections in (recipe.get("policies") or {}).items():
        if isinstance(sections, Mapping) and sections.get("bundle"):
            yield f"policies.{name}.bundle", sections["bundle"]


def _write_prompts(recipe: Recipe, folder: Path) -> None:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    recipe["data"] = {**recipe["data"], "path": str(path)}
