"""From a resolved recipe to a running trainer, in an order one can read."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unirl.algorithms.advantages import AdvantageConfig
from unirl.algorithms.selection import SampleSelection
from unirl.config import instantiate
from unirl.config.instantiation import TARGET
from unirl.config.placement import EVERYTHING, cluster_shape, groups_of
from unirl.config.runs import run_of
from unirl.config.schema import Cluster, PolicySections, Save, built, components
from unirl.config.signatures import read_target
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import LocalRuntime, Runtime
from unirl.distributed.worker import WorkerContext
from unirl.tracking.base import Tracker
from unirl.train.checkpoint import Checkpointer
from unirl.train.export import Exporter
from unirl.trainer.base import Trainer, TrainerSettings
from unirl.trainer.clock import PhaseClock
from unirl.trainer.evaluation import BaseEvaluator, Evaluates, EvaluationResult
from unirl.trainer.guardrails import GuardrailConfig
from unirl.trainer.model_card import write_model_card
from unirl.trainer.residency import DeviceResidents, Resident, Stay, residency_plan
from unirl.trainer.resuming import check_resume
from unirl.types.errors import ConfigError
from unirl.types.protocols import ModelBundle, TrainBackend

Recipe = Mapping[str, Any]  # Any: a recipe's values

ROLE_OF = {"rollout": "engine", "reward": "reward"}
"""What is placed -> the component that it means."""

TRAINER = "unirl.trainer.diffusion.DiffusionTrainer"
EVALUATION = "unirl.trainer.evaluation.EvaluationConfig"
"""What is built where a recipe's section names no other class."""


def build_components(
    recipe: Recipe, run_dir: str, context: WorkerContext, holds: Sequence[str] = EVERYTHING
) -> dict[str, object]:
    """The components of one worker: reward, bundle, pipeline, backend, engine, algorithm, stack, checkpointer, ...

    holds: what of "train", "rollout" and "reward" the worker is for (`unirl.config.placement`).
    """
    if "train" not in holds:
        return _build_beside_training(recipe, context, holds)
    # First, since a reward server that is not there or has other rewards shall be known before models load.
    reward = _build_reward(recipe, context, holds)
    seed_everything(recipe["seed"])
    bundle = instantiate(recipe["bundle"], device=context.device)
    pipeline = instantiate(recipe["pipeline"], bundle=bundle)
    backend = instantiate(recipe["backend"], bundle=bundle, device=context.device)
    engine = None
    if "rollout" in holds:
        engine = _build_engine(recipe, context, bundle=bundle, pipeline=pipeline, policies=backend)
    algorithm = instantiate(recipe["algorithm"], pipeline=pipeline, policies=backend)
    stack = instantiate(recipe["stack"], backend=backend, algorithms=algorithm)
    if reward is not None:
        algorithm.use_reward(reward)
    if engine is not None:
        if engine.has_trainer_logp and backend.computes_in_float32 and instantiate(recipe["sampling"]).is_float32:
            algorithm.trust_rollout()
        _announce(recipe, engine, reward)
    components: dict[str, object] = {}
    if recipe.get("sync"):
        offered = _taken(recipe, "sync", {"sampling": instantiate(recipe["sampling"])})
        components["sync"] = instantiate(
            recipe["sync"], backend=backend, engine=engine, pipeline=pipeline, rank=context.rank, **offered
        )
    save = built(Save, recipe.get("save") or {})
    checkpointer = Checkpointer(
        backend,
        str(Path(run_dir) / "checkpoints"),
        keep_last=save.keep_last,
        keep_best=save.keep_best,
        is_async=save.is_async,
    )
    made = {
        "bundle": bundle,
        "pipeline": pipeline,
        "backend": backend,
        "engine": engine,
        "algorithm": algorithm,
        "stack": stack,
        "reward": reward,
        "checkpointer": checkpointer,
        "exporter": Exporter(backend, bundle),
        **components,
    }
    return {name: component for name, component in made.items() if component is not None}


def _build_beside_training(recipe: Recipe, context: WorkerContext, holds: Sequence[str]) -> dict[str, object]:
    """An engine with weights of its own, reward models, or both, in a worker that trains nothing."""
    made = {}
    reward = _build_reward(recipe, context, holds)
    if reward is not None:
        made["reward"] = reward
    if "rollout" in holds:
        seed_everything(recipe["seed"])
        bundle = instantiate(recipe["bundle"], device=context.device)
        pipeline = instantiate(recipe["pipeline"], bundle=bundle)
        made["engine"] = _instantiate_engine(recipe, context, bundle=bundle, pipeline=pipeline, policies=None)
        _announce(recipe, made["engine"], reward)
    return made


def _build_reward(recipe: Recipe, context: WorkerContext, holds: Sequence[str]) -> Any:  # Any: the recipe's reward
    """The reward where it scores, and where an algorithm differentiates it."""
    differentiates = read_target(recipe["algorithm"][TARGET]).constants.get("requires_reward_gradient")
    if "reward" in holds or ("train" in holds and differentiates):
        return instantiate(recipe["reward"], device=context.device)
    return None


def _announce(recipe: Recipe, engine: Any, reward: Any) -> None:  # Any: the recipe's engine and reward
    """Let the engine hand over what it makes to the reward of this worker, where they work at one time."""
    if recipe["reward"].get("is_async"):
        engine.announce_to(reward.take)


def _build_engine(
    recipe: Recipe,
    context: WorkerContext,
    *,
    bundle: ModelBundle,
    pipeline: object,
    policies: TrainBackend,
) -> Any:  # Any: the engine of a recipe
    """The engine; one with a model of its own gets a second bundle, and a pipeline over it."""
    if read_target(recipe["engine"][TARGET]).constants.get("has_own_model"):
        with torch.random.fork_rng():  # what is drawn after it is the same with any engine
            bundle = instantiate(recipe["bundle"], device=context.device)
            pipeline = instantiate(recipe["pipeline"], bundle=bundle)
    return _instantiate_engine(recipe, context, bundle=bundle, pipeline=pipeline, policies=policies)


def _instantiate_engine(
    recipe: Recipe, context: WorkerContext, *, bundle: ModelBundle, pipeline: object, policies: TrainBackend | None
) -> Any:  # Any: the engine of a recipe
    offered = {"device": context.device, "rank": context.rank, "bundle": bundle}
    return instantiate(recipe["engine"], pipeline=pipeline, policies=policies, **_taken(recipe, "engine", offered))


def _taken(recipe: Recipe, section: str, offered: Mapping[str, object]) -> dict[str, object]:
    """Of what wiring can add to a section, what its target takes."""
    found = {**components(), **components(PolicySections)}[section]
    taken = found.if_taken & set(read_target(recipe[section][TARGET]).parameters)
    return {name: offered[name] for name in taken}


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's global generators, the same on every worker (adapters start equal)."""
    random.seed(seed)
    torch.manual_seed(seed)


def make_runtime(recipe: Recipe, run_dir: Path) -> Runtime:
    """The runtime that the recipe names, with its workers built."""
    builder = functools.partial(build_components, recipe, str(run_dir))
    device = recipe["device"]
    if recipe["runtime"] == "local":
        if recipe["num_devices"] != 1:
            raise ConfigError(
                f"runtime: local uses one device, num_devices = {recipe['num_devices']}. Set runtime: ray."
            )
        return LocalRuntime(builder, device=device)
    if recipe["runtime"] == "ray":
        return _start_on_ray(recipe, builder)
    raise ConfigError(f"runtime = {recipe['runtime']!r} must be 'local' or 'ray'")


def _start_on_ray(recipe: Recipe, builder: Callable[..., Mapping[str, object]]) -> Runtime:
    """The workers of a recipe's placement on its cluster, engines elsewhere connected to what trains."""
    # Ray is heavy and optional; a local run never imports it.
    from unirl.distributed.group.ray_runtime import RayRuntime
    from unirl.distributed.group.start import GroupPlan, start_groups

    cluster = built(Cluster, recipe.get("cluster") or {})
    options: dict[str, Any] = {
        "num_devices": recipe["num_devices"],
        "device": recipe["device"],
        "num_nodes": cluster_shape(recipe["num_devices"], cluster).num_nodes,
        "cpus_per_device": cluster.cpus_per_device,
        "address": cluster.address,
        "timeout_s": cluster.timeout_s,
        "start_timeout_s": cluster.start_timeout_s,
    }
    groups = groups_of(recipe)
    if len(groups) == 1 and len(groups[0].devices) == recipe["num_devices"]:
        return RayRuntime(builder, **options)
    plans = [
        GroupPlan(
            group.name,
            functools.partial(builder, holds=group.holds),
            group.devices,
            [ROLE_OF[held] for held in group.holds if held in ROLE_OF],
        )
        for group in groups
    ]
    return start_groups(plans, pushes_from="sync", pushes_to="engine", **options)


def evaluation_of(recipe: Recipe) -> Evaluates | None:
    """The `eval` section built, or None where the recipe has none."""
    return instantiate({TARGET: EVALUATION, **recipe["eval"]}) if recipe.get("eval") else None


def make_evaluator(recipe: Recipe) -> BaseEvaluator | None:
    """The held-out evaluation of the recipe, or None where it has none."""
    config = evaluation_of(recipe)
    if config is None:
        return None
    rows = MultimodalRLDataSource(config.prompts, shuffle=False).rows
    return config.evaluator(rows, instantiate(recipe["sampling"]))


def make_trainer(
    recipe: Recipe,
    runtime: Runtime,
    run_dir: Path,
    trackers: Sequence[Tracker],
    stop: threading.Event,
    clock: PhaseClock | None = None,
) -> Trainer:
    """The trainer of a recipe on a runtime."""
    evaluator = make_evaluator(recipe)
    save = built(Save, recipe.get("save") or {})
    settings = TrainerSettings(
        recipe=recipe["recipe"],
        seed=recipe["seed"],
        batch_size=recipe["batch_size"],
        num_rollouts=recipe["num_rollouts"],
        num_updates=recipe["stack"].get("num_updates_per_batch", 1),
        eval_interval=0 if evaluator is None else evaluator.config.interval,
        eval_interval_cpu_s=None if evaluator is None else evaluator.config.interval_cpu_s,
        max_cpu_s=recipe.get("max_cpu_s"),
        save_interval=save.interval,
        best_metric=save.best_metric,
        media_interval=recipe.get("media_interval", 0),
    )
    rollout_policy = runtime.role("stack").rollout_policy()
    clock = clock if clock is not None else PhaseClock()
    plan = _residency_plan(recipe)
    if plan:
        clock.before = DeviceResidents(plan, runtime).enter
    return instantiate(
        recipe.get("trainer") or {TARGET: TRAINER},
        runtime=runtime,
        settings=settings,
        data=instantiate(recipe["data"], seed=recipe["seed"]),
        sampling=instantiate(recipe["sampling"]),
        advantages=instantiate(recipe["advantages"]) if recipe.get("advantages") else AdvantageConfig(),
        evaluator=evaluator,
        guardrails=GuardrailConfig(**recipe.get("guardrails", {})),
        trackers=trackers,
        run_dir=run_dir,
        config=recipe,
        rollout_policy=rollout_policy,
        stop=stop,
        selection=SampleSelection(**(recipe.get("selection") or {})),
        sync=runtime.role("sync") if recipe.get("sync") else None,
        clock=clock,
    )


def _residency_plan(recipe: Recipe) -> dict[Resident, Stay]:
    run = run_of(recipe)
    algorithms = [algorithm for policy in run.policies.values() for algorithm in policy.algorithms.values()]
    return residency_plan(
        run.file.residency,
        has_own_weights=run.engine.ability("has_own_weights"),
        is_scored_meanwhile=bool(run.reward.get("is_async")),
        trains_through_reward=any(algorithm.ability("requires_reward_gradient") for algorithm in algorithms),
    )


def run_recipe(
    recipe: Recipe, run_dir: Path, trackers: Sequence[Tracker], stop: threading.Event | None = None
) -> dict[str, Any]:
    """Run a resolved, checked recipe to the end; returns its summary."""
    if recipe.get("resume") is not None:
        check_resume(recipe, run_dir)
    with make_runtime(recipe, run_dir) as runtime:
        trainer = make_trainer(recipe, runtime, run_dir, trackers, stop or threading.Event())
        summary = trainer.run(recipe.get("resume"))
    return summary


def load_checkpoint(runtime: Runtime, which: str) -> dict[str, Any]:
    """Restore "newest", "best" (by held-out score) or a step of the run directory on every worker; returns the driver's
    state."""
    checkpointer = runtime.role("checkpointer")
    if which == "best":
        return checkpointer.load_best()
    if which == "newest":
        return checkpointer.load(None)
    if which.isdecimal():
        return checkpointer.load(int(which))
    raise ConfigError(f"--checkpoint {which!r} must be newest, best or the number of a step")


def evaluate_recipe(recipe: Recipe, run_dir: Path, *, checkpoint: str | None) -> EvaluationResult:
    """Held-out evaluation of a recipe's model, or of a checkpoint of its run directory (see `load_checkpoint`)."""
    evaluator = make_evaluator(recipe)
    if evaluator is None:
        raise ConfigError("this recipe has no eval section; add eval.prompts")
    with make_runtime(recipe, run_dir) as runtime:
        runtime.role("stack").prepare()
        if checkpoint is not None:
            load_checkpoint(runtime, checkpoint)
        if recipe.get("sync"):
            runtime.role("sync").push(evaluator.config.policy)
        return evaluator.run(runtime.role("engine"), runtime.role("reward"), runtime.num_shards)


def export_recipe(
    recipe: Recipe, run_dir: Path, folder: Path, *, merged: bool, policy: str = "default", checkpoint: str = "newest"
) -> Path:
    """Write a checkpoint of a run for use outside, with a model card: LoRA weights, or the model with them merged."""
    with make_runtime(recipe, run_dir) as runtime:
        runtime.role("stack").prepare()
        state = load_checkpoint(runtime, checkpoint)
        exporter = runtime.role("exporter")
        if merged:
            exporter.export_merged(str(folder), policy)
        else:
            exporter.export_lora(str(folder), policy)
    write_model_card(folder, recipe, state, run_dir, merged=merged, policy=policy)
    return folder
