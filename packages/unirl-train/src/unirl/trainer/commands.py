"""Commands on a checked recipe: run, evaluate, export."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl.config.runs import ComposedRun, named_copy
from unirl.tracking.base import Tracker
from unirl.train.checkpoint.folder import meant_step
from unirl.train.checkpoint.saved import newest_driver_state
from unirl.trainer.build.assembly import make_evaluator, make_trainer
from unirl.trainer.build.launch import make_runtime
from unirl.trainer.held_out import EvaluationResult
from unirl.trainer.model_card import write_model_card
from unirl.trainer.policy import role_name
from unirl.trainer.resuming import Recipe, check_resume
from unirl.trainer.roles import CheckpointerRole, StackRole, SyncRole
from unirl.types.errors import ConfigError, WorkerError
from unirl.types.weights import LostUpdate

logger = logging.getLogger(__name__)


def run_recipe(
    run: ComposedRun,
    run_dir: Path,
    trackers: Sequence[Tracker],
    stop: threading.Event | None = None,
    *,
    published: Recipe | None = None,
) -> dict[str, Any]:
    """Run a checked recipe to the end; returns its summary.

    published: the recipe as trackers and checkpoints may show it (`unirl.config.recipes.published`). None shows it
    unchanged, for recipes without values from the environment.
    If workers die, all are started again from the newest checkpoint, `max_restarts` times; then raises WorkerError.
    """
    resume, stop = run.file.resume, stop or threading.Event()
    if resume is not None:
        check_resume(run.resolved, run_dir, published)
    restarts = 0
    while True:
        try:
            with make_runtime(run, run_dir) as runtime:
                return make_trainer(run, runtime, run_dir, trackers, stop, published=published).run(resume)
        except WorkerError as error:
            restarts += 1
            if restarts > run.file.max_restarts or stop.is_set():
                raise
            saved = newest_driver_state(run_dir / "checkpoints")
            resume = None if saved is None else "auto"
            place = "the start, since there is no checkpoint" if saved is None else f"rollout {saved['next_rollout']}"
            logger.warning("%s\nrestart %d of %d, from %s", error, restarts, run.file.max_restarts, place)
            for tracker in trackers:
                tracker.close()


def asked_step(run_dir: Path, checkpoint: str) -> int | None:
    """The step of a checkpoint as `unirl.train.checkpoint.folder.meant_step` has it; None for "newest", which stands
    for the newest sound one."""
    return None if checkpoint == "newest" else meant_step(run_dir / "checkpoints", checkpoint)


def evaluate_recipe(run: ComposedRun, run_dir: Path, *, checkpoint: str | None) -> EvaluationResult:
    """Held-out evaluation of a recipe's model, or of a checkpoint of its run directory (see `asked_step`)."""
    evaluator = make_evaluator(run)
    if evaluator is None:
        raise ConfigError("this recipe has no eval section; add eval.prompts")
    step = None if checkpoint is None else asked_step(run_dir, checkpoint)
    with make_runtime(run, run_dir, asks_teachers=False) as runtime:
        runtime.role("stack", StackRole).prepare()
        if checkpoint is not None:
            runtime.role("checkpointer", CheckpointerRole).load(step)
        if runtime.has_role("sync"):
            runtime.role("sync", SyncRole).push(evaluator.config.policy)
        return evaluator.run(runtime, run.scored_track, num_records=run.file.samples.per_evaluation)


def export_recipe(
    run: ComposedRun,
    run_dir: Path,
    folder: Path,
    *,
    merged: bool,
    policy: str = "default",
    checkpoint: str = "newest",
    published: Recipe | None = None,
    in_float32: bool = False,
) -> LostUpdate | None:
    """Export a checkpoint of a run with a model card: LoRA weights, or the model with them merged.

    policy: see `unirl.config.runs.named_copy`. published: the recipe as the card shows it, see `run_recipe`.
    in_float32: write a merged export in float32 instead of the loaded model's dtype. Returns how much of the LoRA's
    update was lost by rounding.
    """
    lost = None
    name, copy = named_copy(run, policy)
    step = asked_step(run_dir, checkpoint)
    with make_runtime(run, run_dir, asks_teachers=False, is_exported=True) as runtime:
        runtime.role("stack", StackRole).prepare()
        state = runtime.role("checkpointer", CheckpointerRole).load(step)
        exporter = runtime.role(role_name(name, "exporter", run.all_policies))
        if merged:
            lost = exporter.export_merged(str(folder), copy, in_float32=in_float32)
        else:
            exporter.export_lora(str(folder), copy)
    recipe, shown = run.resolved, run.resolved if published is None else published
    write_model_card(
        folder,
        recipe,
        state,
        run_dir,
        published=shown,
        merged=merged,
        policy=name,
        copy=copy,
        lost=lost,
        of_blocks=run.policies[name].bundle.abilities.get("index_file") == "modular_model_index.json",
    )
    return lost
