"""The components of one worker, from a resolved recipe."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
import torch

from unirl.config import instantiate
from unirl.config.placement import EVERYTHING
from unirl.config.runs import ComposedRun, teacher_of
from unirl.config.schema import PolicySections, StageSections, components
from unirl.distributed.weight_sync.several import PolicySyncs
from unirl.distributed.worker import WorkerContext
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.policy_stacks import PolicyStacks
from unirl.train.saved_policies import SavedPolicies
from unirl.trainer.policy import Built, BuiltModel, BuiltPolicy, build_model, build_part, build_pipelines, build_policy
from unirl.types.recipe import Part, Policy


def build_components(
    run: ComposedRun,
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
