"""The components of one worker, from a resolved recipe."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import torch

from unirl.config import instantiate
from unirl.config.placement import REWARD, SCORERS, TRAIN, scorer_pools
from unirl.config.runs import ComposedRun, teacher_of
from unirl.config.schema import PolicySections, StageSections, components
from unirl.distributed.weight_sync.several import PolicySyncs
from unirl.distributed.worker import WorkerContext
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.experience_files import EXPERIENCE, ExperienceFiles
from unirl.train.policy_stacks import PolicyStacks
from unirl.train.saved_policies import SavedPolicies
from unirl.trainer.parity import TRAINER_ENGINE
from unirl.trainer.policy import Built, BuiltModel, BuiltPolicy, build_model, build_part, build_policy
from unirl.types.protocols.hosting import HostingPool
from unirl.types.recipe import TARGET, Part, Stage
from unirl.types.stages import BuiltStage

TEXTS_OF_TRAINER = "unirl.rollout.engine.trainside.text.TrainsideTextEngine"
LATENTS_OF_TRAINER = "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine"
"""Engine classes that sample with the model that trains."""
STAGES_ENGINE = "unirl.rollout.stages.engine.StagesEngine"
"""Engine class that joins the engines of several stages."""


def build_components(
    run: ComposedRun,
    run_dir: str,
    context: WorkerContext,
    holds: Sequence[str] | None = None,
    *,
    asks_teachers: bool = True,
    is_exported: bool = False,
    scores: bool = True,
    hosting: Mapping[str, HostingPool] | None = None,
) -> dict[str, object]:
    """The components of one worker: reward, engine, checkpointer, and for each policy bundle, pipeline, backend, ...

    holds: parts that the worker has (`WorkerGroup.holds`); None: all.
    asks_teachers: True if the run trains; otherwise teachers are not built.
    is_exported: True if only weights are needed; reward, engine and sync are then not built.
    scores: False if samples are generated and not scored; the reward is then not built.
    hosting: the pools of kind env, by name.
    """
    seed_everything(run.seed)
    context = replace(context, hosting=hosting or {})
    if holds is None:
        holds = (TRAIN, *(stage.at for stage in run.stages), REWARD)
    if TRAIN not in holds:
        return _build_beside_training(run, context, holds, scores=scores)
    # First, so that a missing or wrong reward server is noticed before models load.
    reward = _build_reward(run, context, holds) if scores and not is_exported else None
    seed_everything(run.seed)  # again, so that models do not depend on the reward
    policies = {name: build_policy(plan, context.device) for name, plan in run.policies.items()}
    here = [stage for stage in run.stages if stage.at in holds]
    sampled = {stage.policy for stage in here}
    still = {name: build_model(plan, context.device) for name, plan in run.frozen.items() if name in sampled}
    models: dict[str, BuiltModel] = {**policies, **still}
    wanted = run.teachers if asks_teachers else {}
    teachers = {name: build_model(plan, context.device) for name, plan in wanted.items()}
    engines = {} if is_exported else _build_engines(run, here, models, context)
    for policy in policies.values():
        _prepare_algorithms(run, policy, engines, reward, teachers if asks_teachers else None)
    engine = _joined(run, engines, models, context)
    if engine is not None:
        _announce(run, engine, reward)
    roles: dict[str, object] = {"reward": reward, "engine": engine}
    for model in models.values():
        roles.update(model.roles(run.all_policies))
    if len(run.all_policies) > 1:
        stacks = {name: policy.stack for name, policy in policies.items()}
        roles["stack"] = PolicyStacks(stacks, None if run.is_staged else run.sampled)
    roles["sync"] = None if is_exported else _build_sync(run, policies, engines, context)
    if not is_exported and run.guardrails is not None and run.guardrails.get("parity_interval") is not None:
        roles[TRAINER_ENGINE] = _build_trainer_engine(run, policies[run.sampled], context)
    roles["checkpointer"] = _build_checkpointer(run, policies, run_dir)
    if run.file.schedule.experience is not None:
        folder, place = Path(run_dir), policies[run.sampled].backend.mesh_place
        roles["experience"] = ExperienceFiles(folder / EXPERIENCE, folder / "checkpoints", place)
    return {name: component for name, component in roles.items() if component is not None}


def _prepare_algorithms(
    run: ComposedRun,
    policy: BuiltPolicy,
    engines: Mapping[str, Built],
    reward: Built,
    teachers: Mapping[str, BuiltModel] | None,
) -> None:
    """Give a policy's algorithms what they need: teacher, reward, and the rollout's log-probs if every engine that
    samples from the policy computes them as a replay does. Engines in other workers do not, nor do samples that may be
    of older weights."""
    own = [engines.get(stage.at) for stage in run.stages if stage.policy == policy.plan.name]
    replays_exactly = policy.backend.computes_in_float32 and all(e is not None and e.has_trainer_logp for e in own)
    if run.file.schedule.takes_older:
        replays_exactly = False  # the rollout may be of older weights than those before the first update
    for track, algorithm in policy.algorithms.items():
        sampling = instantiate((run.stage_of(track) if run.is_staged else run.stages[0]).sampling.node)
        asked = teacher_of(policy.plan.algorithms[track])
        if asked is not None and teachers is not None:
            teacher = teachers[asked]
            algorithm.use_teacher(teacher.pipelines[teacher.plan.pipeline_name(track)], sampling)
        if reward is not None:
            algorithm.use_reward(reward)
        if replays_exactly and sampling.is_float32:
            algorithm.trust_rollout()


def _build_sync(
    run: ComposedRun, policies: Mapping[str, BuiltPolicy], engines: Mapping[str, Built], context: WorkerContext
) -> Built:
    """The weight sync of the sampled policy, or with stages those of all policies joined; None if nothing is pushed."""
    component = components(PolicySections)["sync"]
    syncs, tracks = {}, {}
    for name, policy in policies.items():
        stage = run.pushed_stage(policy.plan)
        if policy.plan.sync is None or stage is None:
            continue
        track = stage.track or policy.plan.stack.get("track")
        offered = {
            "backend": policy.backend,
            "engine": engines.get(stage.at),
            "pipeline": policy.pipelines[policy.plan.pipeline_name(str(track))],
            "rank": context.rank,
            "sampling": instantiate(stage.sampling.node),
        }
        syncs[name], tracks[name] = build_part(policy.plan.sync, component, offered), str(track)
    if run.is_staged:
        return PolicySyncs(syncs, tracks, names_metrics=len(run.all_policies) > 1) if syncs else None
    return syncs.get(run.sampled)


def _build_trainer_engine(run: ComposedRun, policy: BuiltPolicy, context: WorkerContext) -> Built:
    """What samples with the model that trains, as the run's engine does with its copy; see `unirl.trainer.parity`."""
    part = run.engine
    size = part.get("forward_batch_size") or policy.plan.stack.get("micro_batch_size")
    offered = {
        "pipeline": policy.pipelines[next(iter(policy.plan.pipelines))],
        "policies": policy.backend,
        "forward_batch_size": size,
        "rank": context.rank,
        "track": run.stages[0].track,
    }
    if run.sampling.ability("samples_tokens"):
        return instantiate({TARGET: TEXTS_OF_TRAINER}, **offered)
    same = {name: part.node[name] for name in ("media_bits", "decode") if part.node.get(name) is not None}
    return instantiate({TARGET: LATENTS_OF_TRAINER}, **offered, **same, device=context.device)


def _build_checkpointer(run: ComposedRun, policies: Mapping[str, BuiltPolicy], run_dir: str) -> Checkpointer:
    """The checkpointer, whose checkpoints hold all policies."""
    backends = {name: policy.backend for name, policy in policies.items()}
    save = run.file.save
    return Checkpointer(
        SavedPolicies(backends) if len(run.all_policies) > 1 else backends[run.sampled],
        str(Path(run_dir) / "checkpoints"),
        keep_last=save.keep_last,
        keep_best=save.keep_best,
        is_async=save.is_async,
        mirror=save.mirror,
        samples=Path(run_dir),
    )


def _build_beside_training(
    run: ComposedRun, context: WorkerContext, holds: Sequence[str], *, scores: bool
) -> dict[str, object]:
    """The components of a worker that does not train: reward models, or engines with separate weights or with policies
    that are not trained, or both. The engine of each stage is a role too, which receives pushes."""
    made = {}
    reward = _build_reward(run, context, holds) if scores else None
    if reward is not None:
        made["reward"] = reward
    here = [stage for stage in run.stages if stage.at in holds]
    if here:
        seed_everything(run.seed)  # again, as in workers that train
        # All stages of a policy share one model; an engine with its own model does not share it.
        models = {
            stage.policy: build_model(run.frozen[stage.policy], context.device)
            for stage in here
            if stage.policy in run.frozen and not stage.engine.ability("has_own_model")
        }
        engines = _build_engines(run, here, models, context)
        made.update(engines)
        made.update({pushed_role(stage): engines[stage.at] for stage in here})
        made["engine"] = _joined(run, engines, models, context)
        _announce(run, made["engine"], reward)
    return made


def pushed_role(stage: Stage) -> str:
    """Name of the engine of a stage that receives pushes: one that takes turns is not asked for canaries in turns."""
    return stage.at if stage.turns is None else f"{stage.at}.in_turns"


def _build_reward(run: ComposedRun, context: WorkerContext, holds: Sequence[str]) -> Built:
    """The reward where it scores, with the scorers that stand in this worker, and where an algorithm differentiates it;
    None elsewhere."""
    algorithms = [part for policy in run.policies.values() for part in policy.algorithms.values()]
    differentiates = any(part.ability("requires_reward_gradient") for part in algorithms)
    offered: dict[str, object] = {"device": context.device, "elsewhere": ()}
    pools, part = scorer_pools(run), run.reward
    here = [name for name in pools if SCORERS + name in holds]
    if pools and (REWARD in holds or here):
        scorers = part.node["scorers"]
        own = here if REWARD not in holds else [name for name in scorers if name not in pools or name in here]
        weights = {name: 1.0 for name in scorers} | dict(part.node.get("weights") or {})
        if REWARD in holds:  # what the others have scored is composed here, in the order of the recipe
            offered["elsewhere"] = [name for name in scorers if name not in own]
            weights = {name: weights[name] for name in scorers}
        else:
            weights = dict.fromkeys(own, 1.0)
        part = replace(part, node={**part.node, "scorers": {name: scorers[name] for name in own}, "weights": weights})
    elif REWARD not in holds and not (TRAIN in holds and differentiates):
        return None
    return build_part(part, components()["reward"], offered)


def _announce(run: ComposedRun, engine: Built, reward: Built) -> None:
    """With asynchronous rewards, let the engine pass finished samples to the reward of this worker."""
    if run.reward.get("is_async") and reward is not None:
        engine.announce_to(reward.take)


def _build_engines(
    run: ComposedRun, here: Sequence[Stage], models: dict[str, BuiltModel], context: WorkerContext
) -> dict[str, Built]:
    """The engines of stages, by where these stand. Stages that take the engine of their policy share it where it has
    its own weights, which are pushed once."""
    built: dict[str, Built] = {}
    found = {}
    for stage in here:
        key = stage.engine.at if stage.engine.ability("has_own_weights") else stage.at
        if key not in built:
            built[key] = _build_engine(run, stage, models, context)
        found[stage.at] = built[key]
    return found


def _build_engine(run: ComposedRun, stage: Stage, models: dict[str, BuiltModel], context: WorkerContext) -> Built:
    """The engine of a stage. If it has its own model, or its policy's model is not in this worker, it gets a separate
    bundle and pipeline.

    models: by policy; new ones are added, so that other stages can use their pipelines.
    """
    plan, part = run.all_policies[stage.policy], stage.engine
    name = plan.pipeline_name(str(stage.track)) if run.is_staged else next(iter(plan.pipelines))
    model = own = models.get(stage.policy)
    if own is None or part.ability("has_own_model"):
        with torch.random.fork_rng():  # so that later draws do not depend on the engine
            own = build_model(plan, context.device)
        models.setdefault(stage.policy, own)
    offered = {
        "policies": model.backend if isinstance(model, BuiltPolicy) else None,
        "bundle": own.bundle,
        "pipeline": own.pipelines[name],
        "device": context.device,
        "rank": context.rank,
        "keeps_cache": run.file.schedule.on_push == "in_place",
    }
    if run.is_staged:
        return build_part(part, components(StageSections)["engine"], {**offered, "track": stage.track})
    engine = build_part(part, components()["engine"], offered)
    _give_pool(engine, part.inner.get("environment"), context)
    return engine


def _joined(
    run: ComposedRun, engines: Mapping[str, Built], models: Mapping[str, BuiltModel], context: WorkerContext
) -> Built:
    """The engine of this worker: the only one, or the joined engines of its stages; None if there are none. One that
    takes turns with an environment is wrapped in these."""
    engines = {
        stage.at: _taking_turns(stage, engines[stage.at], models, context)
        for stage in run.stages
        if stage.at in engines
    }
    if not engines or not run.is_staged:
        return next(iter(engines.values()), None)
    built = {}
    for stage in (stage for stage in run.stages if stage.at in engines):
        model, track = models[stage.policy], str(stage.track)
        assert stage.reads is not None  # noqa: S101 - recipes with stages have it
        built[track] = BuiltStage(
            engine=engines[stage.at],
            pipeline=model.pipelines[model.plan.pipeline_name(track)],
            reader=instantiate(stage.reads.node),
            policy=stage.policy,
            grows_from=stage.grows_from,
            parent_pipeline=_parent_pipeline(run, stage, models),
            can_resume=bool(stage.engine.ability("can_resume")),
        )
    return instantiate({TARGET: STAGES_ENGINE}, stages=built)


def _parent_pipeline(run: ComposedRun, stage: Stage, models: Mapping[str, BuiltModel]) -> Built:
    """The pipeline of the track that a stage grows from; None if its model is not in this worker."""
    if stage.grows_from is None:
        return None
    parent = run.stage_of(stage.grows_from)
    model = models.get(parent.policy)
    return None if model is None else model.pipelines[model.plan.pipeline_name(str(parent.track))]


def _taking_turns(stage: Stage, engine: Built, models: Mapping[str, BuiltModel], context: WorkerContext) -> Built:
    if stage.turns is None:
        return engine
    model = models[stage.policy]
    offered = {
        "engine": engine,
        "pipeline": model.pipelines[model.plan.pipeline_name(str(stage.track))],
        "policies": model.backend if isinstance(model, BuiltPolicy) else None,
    }
    turns = build_part(stage.turns, components(StageSections)["turns"], offered)
    _give_pool(turns, stage.turns, context)
    return turns


def _give_pool(engine: Built, part: Part | None, context: WorkerContext) -> None:
    """Let an engine play in the pool of kind env that a part of it names."""
    pool = None if part is None else context.hosting.get(str(part.node.get("pool")))
    if pool is not None:
        engine.play_in(pool)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, equally on every worker (so that adapters start equal)."""
    random.seed(seed)
    numpy.random.mtrand.seed(list(divmod(seed, 2**32)))  # it takes 32-bit words
    torch.manual_seed(seed)
