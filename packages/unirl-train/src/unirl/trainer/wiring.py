"""From a resolved recipe to a running trainer, in an order one can read."""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from unirl.algorithms.advantages import Advantages
from unirl.algorithms.selection import SampleSelection
from unirl.config import instantiate
from unirl.config.placement import EVERYTHING, cluster_shape, groups_of_run
from unirl.config.runs import ComposedRun, named_copy, run_of, teacher_of
from unirl.config.schema import PolicySections, StageSections, components
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import LocalRuntime, Runtime
from unirl.distributed.weight_sync.several import PolicySyncs
from unirl.distributed.worker import WorkerContext
from unirl.tracking.base import Tracker
from unirl.tracking.console import scorer_weights
from unirl.train.checkpoint import Checkpointer
from unirl.train.policy_stacks import PolicyStacks
from unirl.train.saved_policies import SavedPolicies
from unirl.trainer.base import Trainer
from unirl.trainer.clock import PhaseClock
from unirl.trainer.collector import Collector
from unirl.trainer.evaluation import BaseEvaluator, Evaluates, EvaluationResult
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.learner import Learner
from unirl.trainer.modality import Modality
from unirl.trainer.model_card import write_model_card
from unirl.trainer.policy import (
    Built,
    BuiltModel,
    BuiltPolicy,
    build_model,
    build_part,
    build_pipelines,
    build_policy,
    role_name,
)
from unirl.trainer.record import RunRecord
from unirl.trainer.residency import DeviceResidents, Resident, Stay, residency_plan
from unirl.trainer.resuming import Digests, check_resume, digests_of
from unirl.trainer.roles import CheckpointerRole, StackRole, SyncRole
from unirl.trainer.settings import TrainerSettings
from unirl.types.errors import ConfigError
from unirl.types.recipe import Part, Policy
from unirl.types.weights import LostUpdate

Recipe = Mapping[str, Any]  # Any: a recipe's values

ROLE_OF = {"rollout": "engine", "reward": "reward"}
"""What is placed -> the component that it means."""


def build_components(
    recipe: Recipe,
    run_dir: str,
    context: WorkerContext,
    holds: Sequence[str] = EVERYTHING,
    *,
    asks_teachers: bool = True,
    is_exported: bool = False,
) -> dict[str, object]:
    """The components of one worker: reward, engine, checkpointer, and of each policy bundle, pipeline, backend, ...

    holds: what of "train", "rollout" and "reward" the worker is for (`unirl.config.placement`).
    asks_teachers: whether the run trains; without, teachers are neither built nor handed over.
    is_exported: whether only weights are taken from the run: neither reward, nor engine, nor sync is built then.
    """
    run = run_of(recipe)
    seed_everything(run.seed)
    if "train" not in holds:
        return _build_beside_training(run, context, holds)
    # First, since a reward server that is not there or has other rewards shall be known before models load.
    reward = None if is_exported else _build_reward(run, context, holds)
    seed_everything(run.seed)  # again, so that models are the same with any reward
    policies = {name: build_policy(plan, context.device) for name, plan in run.policies.items()}
    models = {**policies, **{name: build_model(plan, context.device) for name, plan in run.frozen.items()}}
    wanted = run.teachers if asks_teachers else {}
    teachers = {name: build_model(plan, context.device) for name, plan in wanted.items()}
    engines: dict[str, Built] = {}
    engine = None
    if "rollout" in holds and not is_exported:
        if run.is_composed:
            engines = {name: _build_stage_engine(run, model, context) for name, model in models.items()}
        engine = _build_engine(run, policies, models, engines, context)
    for name, policy in policies.items():
        own_engine = engines.get(name, engine if name == run.sampled or run.samples_all else None)
        sampling = instantiate((policy.plan.sampling or run.sampling).node)
        replays_exactly = own_engine is not None and own_engine.has_trainer_logp and policy.backend.computes_in_float32
        for track, algorithm in policy.algorithms.items():
            asked = teacher_of(policy.plan.algorithms[track])
            if asked is not None and asks_teachers:
                teacher = teachers[asked]
                algorithm.use_teacher(teacher.pipelines[teacher.plan.pipeline_name(track)], sampling)
            if reward is not None:
                algorithm.use_reward(reward)
            if replays_exactly and sampling.is_float32:
                algorithm.trust_rollout()
    if engine is not None:
        _announce(run, engine, reward)
    roles: dict[str, object] = {"reward": reward, "engine": engine}
    for model in models.values():
        roles.update(model.roles(models))
    if len(models) > 1:
        stacks = {name: policy.stack for name, policy in policies.items()}
        roles["stack"] = PolicyStacks(stacks, None if run.is_composed else run.sampled)
    roles["sync"] = None if is_exported else _build_sync(run, policies, engines, engine, context)
    roles["checkpointer"] = _build_checkpointer(run, policies, run_dir)
    return {name: component for name, component in roles.items() if component is not None}


def _build_sync(
    run: ComposedRun,
    policies: Mapping[str, BuiltPolicy],
    engines: Mapping[str, Built],
    engine: Built,
    context: WorkerContext,
) -> Built:
    """The weight sync of the policy that the engine samples from, or those of all policies with an engine of their own
    as one; None where nothing is pushed."""
    component = components(PolicySections)["sync"]
    syncs = {
        name: build_part(
            policy.plan.sync,
            component,
            {
                "backend": policy.backend,
                "engine": engines.get(name, engine),
                # Of a policy with two tracks, that of what is scored, which is drawn by an engine of its own.
                "pipeline": policy.pipelines.get(run.scored_track or "", policy.pipeline),
                "rank": context.rank,
                "sampling": instantiate((policy.plan.sampling or run.sampling).node),
            },
        )
        for name, policy in policies.items()
        if policy.plan.sync is not None
    }
    if run.is_composed:
        return PolicySyncs(syncs) if syncs else None
    return syncs.get(run.sampled)


def _build_checkpointer(run: ComposedRun, policies: Mapping[str, BuiltPolicy], run_dir: str) -> Checkpointer:
    """One checkpoint holds all policies."""
    backends = {name: policy.backend for name, policy in policies.items()}
    save = run.file.save
    return Checkpointer(
        SavedPolicies(backends) if len(run.all_policies) > 1 else backends[run.sampled],
        str(Path(run_dir) / "checkpoints"),
        keep_last=save.keep_last,
        keep_best=save.keep_best,
        is_async=save.is_async,
    )


def _build_beside_training(run: ComposedRun, context: WorkerContext, holds: Sequence[str]) -> dict[str, object]:
    """An engine with weights of its own, reward models, or both, in a worker that trains nothing."""
    made = {}
    reward = _build_reward(run, context, holds)
    if reward is not None:
        made["reward"] = reward
    if "rollout" in holds:
        seed_everything(run.seed)  # again, as where it trains
        made["engine"] = _build_engine(run, {}, {}, {}, context)
        _announce(run, made["engine"], reward)
    return made


def _build_reward(run: ComposedRun, context: WorkerContext, holds: Sequence[str]) -> Built:
    """The reward where it scores, and where an algorithm differentiates it; None elsewhere."""
    algorithms = [part for policy in run.policies.values() for part in policy.algorithms.values()]
    differentiates = any(part.ability("requires_reward_gradient") for part in algorithms)
    if "reward" in holds or ("train" in holds and differentiates):
        return build_part(run.reward, components()["reward"], {"device": context.device})
    return None


def _announce(run: ComposedRun, engine: Built, reward: Built) -> None:
    """Let the engine hand over what it makes to the reward of this worker, where they work at one time."""
    if run.reward.get("is_async"):
        engine.announce_to(reward.take)


def _build_engine(
    run: ComposedRun,
    policies: Mapping[str, BuiltPolicy],
    models: Mapping[str, BuiltModel],
    engines: Mapping[str, Built],
    context: WorkerContext,
) -> Built:
    """The engine of the run. models: of all policies. engines: by policy, where it is composed of them."""
    offered: dict[str, object] = {
        "policies": policies[run.sampled].backend if run.sampled in policies else None,
        "pipelines": {name: model.pipelines for name, model in models.items()},
        "stores": {name: policy.backend for name, policy in policies.items()},
        "engines": engines,
    }
    if engines:
        return build_part(run.engine, components()["engine"], {**offered, **_place(context)})
    return _engine_of(run.engine, run.policy, models.get(run.sampled), offered, context)


def _build_stage_engine(run: ComposedRun, model: BuiltModel, context: WorkerContext) -> Built:
    """The engine of one policy's own."""
    policies = model.backend if isinstance(model, BuiltPolicy) else None
    assert model.plan.engine is not None  # noqa: S101 - `run_of` refuses a composed engine without
    return _engine_of(model.plan.engine, model.plan, model, {"policies": policies}, context)


def _engine_of(
    part: Part, plan: Policy, model: BuiltModel | None, offered: Mapping[str, object], context: WorkerContext
) -> Built:
    """An engine for one model. One with a model of its own, or in a worker that trains nothing, gets a bundle for
    itself and a pipeline over it."""
    if model is not None and not part.ability("has_own_model"):
        bundle, pipeline = model.bundle, model.pipeline
    else:
        with torch.random.fork_rng():  # what is drawn after it is the same with any engine
            bundle = build_part(plan.bundle, components(PolicySections)["bundle"], {"device": context.device})
            pipeline = next(iter(build_pipelines(plan, bundle).values()))
    own = {"bundle": bundle, "pipeline": pipeline, **_place(context)}
    return build_part(part, components(StageSections)["engine"], {**offered, **own})


def _place(context: WorkerContext) -> dict[str, object]:
    return {"device": context.device, "rank": context.rank}


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, the same on every worker (adapters start equal)."""
    random.seed(seed)
    numpy.random.mtrand.seed(list(divmod(seed, 2**32)))  # it takes words of 32 bits
    torch.manual_seed(seed)


def make_runtime(recipe: Recipe, run_dir: Path, *, asks_teachers: bool = True, is_exported: bool = False) -> Runtime:
    """The runtime that the recipe names, with its workers built; see `build_components`."""
    builder = functools.partial(
        build_components, recipe, str(run_dir), asks_teachers=asks_teachers, is_exported=is_exported
    )
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
    from unirl.distributed.tensor.planes.choice import make_plane

    run = run_of(recipe)
    cluster = run.file.cluster
    options: dict[str, Any] = {
        "num_devices": run.num_devices,
        "device": run.device,
        "num_nodes": cluster_shape(run.num_devices, cluster).num_nodes,
        "cpus_per_device": cluster.cpus_per_device,
        "address": cluster.address,
        "timeout_s": cluster.timeout_s,
        "start_timeout_s": cluster.start_timeout_s,
        "plane": make_plane(cluster.transport, cluster.transfer_queue, cluster.timeout_s),
    }
    groups = groups_of_run(run)
    if len(groups) == 1 and len(groups[0].devices) == run.num_devices:
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
    part = run_of(recipe).evaluation
    return None if part is None else instantiate(part.node)


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
    published: Recipe | None = None,
) -> Trainer:
    """The trainer of a recipe on a runtime. published: see `run_recipe`."""
    run = run_of(recipe)
    shown = recipe if published is None else published
    file = run.file
    evaluator = make_evaluator(recipe)
    updates = [policy.stack.get("num_updates_per_batch", 1) for policy in run.policies.values()]
    settings = TrainerSettings(
        recipe=file.recipe,
        seed=run.seed,
        batch_size=run.batch_size,
        num_rollouts=file.num_rollouts,
        num_updates=math.lcm(*updates),
        eval_interval=0 if evaluator is None else evaluator.config.interval,
        eval_interval_cpu_s=None if evaluator is None else evaluator.config.interval_cpu_s,
        max_cpu_s=file.max_cpu_s,
        save_interval=file.save.interval,
        best_metric=file.save.best_metric,
        media_interval=file.media_interval,
    )
    clock = clock if clock is not None else PhaseClock()
    plan = _residency_plan(run)
    if plan:
        backends = [role_name(name, "backend", run.all_policies) for name in run.policies]
        clock.before = DeviceResidents(plan, runtime, backends).enter
    return assemble(
        runtime,
        settings,
        modality=instantiate(run.modality.node),
        data=build_part(run.data, components()["data"], {"seed": run.seed}),
        sampling=instantiate(run.sampling.node),
        advantages=instantiate(run.advantages.node),
        evaluator=evaluator,
        guardrails=functools.partial(
            Guardrails,
            GuardrailConfig() if run.guardrails is None else instantiate(run.guardrails.node),
            scorers=[name for name, weight in scorer_weights(recipe["reward"]).items() if weight >= 0],
            learns_from_reward=not all(algorithm.ability("teacher_option") for algorithm in _algorithms(run)),
        ),
        trackers=trackers,
        run_dir=run_dir,
        config=shown,
        digests=digests_of(recipe, shown),
        stop=stop,
        selection=SampleSelection() if run.selection is None else instantiate(run.selection.node),
        sync=runtime.role("sync", SyncRole) if _pushes(run) else None,
        scored_track=run.scored_track,
        track_advantages={
            track: instantiate(policy.advantages.node)
            for policy in run.policies.values()
            if policy.advantages is not None
            for track in policy.algorithms
        },
        clock=clock,
        loop=lambda **parts: build_part(run.trainer, components()["trainer"], parts),
    )


def _pushes(run: ComposedRun) -> bool:
    """Whether a policy is pushed to its engine."""
    sampled = run.policies.values() if run.is_composed else [run.policy]
    return any(policy.sync is not None for policy in sampled)


def assemble(
    runtime: Runtime,
    settings: TrainerSettings,
    *,
    modality: Modality[Any],  # Any: as the sampling parameters
    data: MultimodalRLDataSource,
    sampling: Any,  # Any: parameters of the modality
    advantages: Advantages,
    evaluator: BaseEvaluator | None,
    guardrails: Callable[..., Guardrails],
    trackers: Sequence[Tracker],
    run_dir: Path,
    config: Recipe,
    stop: threading.Event,
    digests: Digests | None = None,
    selection: SampleSelection | None = None,
    sync: SyncRole | None = None,
    scored_track: str | None = None,
    track_advantages: Mapping[str, Advantages] | None = None,
    clock: PhaseClock | None = None,
    loop: Callable[..., Trainer] = Trainer,
) -> Trainer:
    """Collector, learner and run record on a runtime, and the loop that joins them.

    guardrails: makes them of `exact_ratios`, which the stack knows.
    """
    clock = clock if clock is not None else PhaseClock()
    stack = runtime.role("stack", StackRole)
    collector = Collector(
        runtime,
        settings,
        modality=modality,
        data=data,
        sampling=sampling,
        advantages=advantages,
        track_advantages=track_advantages,
        clock=clock,
        selection=selection,
        rollout_policy=stack.rollout_policy(),
        scored_track=scored_track,
    )
    watching = guardrails(exact_ratios=stack.exact_ratios())
    learner = Learner(runtime, guardrails=watching, clock=clock, sync=sync)
    record = RunRecord(
        runtime,
        settings,
        modality=modality,
        evaluator=evaluator,
        trackers=trackers,
        run_dir=run_dir,
        config=config,
        digests=digests or {},
        clock=clock,
        scored_track=scored_track,
    )
    return loop(settings=settings, collector=collector, learner=learner, record=record, clock=clock, stop=stop)


def _residency_plan(run: ComposedRun) -> dict[Resident, Stay]:
    return residency_plan(
        run.file.residency,
        has_own_weights=all(stage.engine.ability("has_own_weights") for stage in run.stages()),
        is_scored_meanwhile=bool(run.reward.get("is_async")),
        trains_through_reward=any(algorithm.ability("requires_reward_gradient") for algorithm in _algorithms(run)),
    )


def _algorithms(run: ComposedRun) -> list[Part]:
    return [algorithm for policy in run.policies.values() for algorithm in policy.algorithms.values()]


def run_recipe(
    recipe: Recipe,
    run_dir: Path,
    trackers: Sequence[Tracker],
    stop: threading.Event | None = None,
    *,
    published: Recipe | None = None,
) -> dict[str, Any]:
    """Run a resolved, checked recipe to the end; returns its summary.

    published: the recipe as trackers and checkpoints may show it (`unirl.config.recipes.published`); None shows it as
    it is, which is for recipes that hold nothing of the environment.
    """
    if recipe.get("resume") is not None:
        check_resume(recipe, run_dir, published)
    with make_runtime(recipe, run_dir) as runtime:
        trainer = make_trainer(recipe, runtime, run_dir, trackers, stop or threading.Event(), published=published)
        summary = trainer.run(recipe.get("resume"))
    return summary


def load_checkpoint(runtime: Runtime, which: str) -> dict[str, Any]:
    """Restore "newest", "best" (by held-out score) or a step of the run directory on every worker; returns the driver's
    state."""
    checkpointer = runtime.role("checkpointer", CheckpointerRole)
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
    with make_runtime(recipe, run_dir, asks_teachers=False) as runtime:
        runtime.role("stack", StackRole).prepare()
        if checkpoint is not None:
            load_checkpoint(runtime, checkpoint)
        if runtime.has_role("sync"):
            runtime.role("sync", SyncRole).push(evaluator.config.policy)
        return evaluator.run(runtime, run_of(recipe).scored_track)


def export_recipe(
    recipe: Recipe,
    run_dir: Path,
    folder: Path,
    *,
    merged: bool,
    policy: str = "default",
    checkpoint: str = "newest",
    published: Recipe | None = None,
    in_float32: bool = False,
) -> LostUpdate | None:
    """Write a checkpoint of a run for use outside, with a model card: LoRA weights, or the model with them merged.

    policy: see `unirl.config.runs.named_copy`. published: the recipe as the card shows it, see `run_recipe`.
    in_float32: of a merged export, instead of the dtype of the loaded model. Returns what rounding took of what a LoRA
    changes.
    """
    lost = None
    run = run_of(recipe)
    name, copy = named_copy(run, policy)
    with make_runtime(recipe, run_dir, asks_teachers=False, is_exported=True) as runtime:
        runtime.role("stack", StackRole).prepare()
        state = load_checkpoint(runtime, checkpoint)
        exporter = runtime.role(role_name(name, "exporter", run.all_policies))
        if merged:
            lost = exporter.export_merged(str(folder), copy, in_float32=in_float32)
        else:
            exporter.export_lora(str(folder), copy)
    shown = recipe if published is None else published
    write_model_card(folder, recipe, state, run_dir, published=shown, merged=merged, policy=name, copy=copy, lost=lost)
    return lost
