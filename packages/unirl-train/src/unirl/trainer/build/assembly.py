"""Makes collector, learner, run record and evaluation on a runtime, and the loop that joins them."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.algorithms.advantages import Advantages
from unirl.algorithms.replay_buffer import ReplayBuffer
from unirl.algorithms.selection import SampleSelection
from unirl.config import instantiate
from unirl.config.runs import ComposedRun
from unirl.config.schema import Samples, components
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import Runtime
from unirl.tracking.base import Tracker
from unirl.tracking.console import scorer_weights
from unirl.train.checkpoint.sample_files import IN_FLIGHT
from unirl.trainer.base import Trainer
from unirl.trainer.clock import PhaseClock
from unirl.trainer.collector import Collector
from unirl.trainer.evaluation import EvaluationConfig, Evaluator
from unirl.trainer.experience import Experience
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.learner import Learner
from unirl.trainer.loops.asynchronous import AsyncTrainer
from unirl.trainer.loops.hybrid import Handover, HybridTrainer, Lending
from unirl.trainer.loops.in_flight import InFlight
from unirl.trainer.loops.order import REQUESTS, OrderLog, order_of
from unirl.trainer.loops.pipelined import PipelinedTrainer
from unirl.trainer.modality import Modality
from unirl.trainer.parity import Parity
from unirl.trainer.policy import build_part, role_name
from unirl.trainer.record import RunRecord
from unirl.trainer.residency import DeviceResidents, Resident, Stay, residency_plan
from unirl.trainer.resuming import Digests, Recipe, digests_of
from unirl.trainer.reward_rules import groupwise_scorers, ignored_prompt
from unirl.trainer.roles import BackendRole, StackRole, SyncRole
from unirl.trainer.scouting import Scouting
from unirl.trainer.settings import TrainerSettings
from unirl.types.recipe import Part
from unirl.types.sampling import StagedSamplingParams

logger = logging.getLogger(__name__)


def evaluation_of(run: ComposedRun) -> EvaluationConfig | None:
    """The built `eval` section, or None if the recipe has none."""
    return None if run.evaluation is None else instantiate(run.evaluation.node)


def make_evaluator(run: ComposedRun) -> Evaluator | None:
    """The held-out evaluation of the recipe, or None if it has none."""
    config = evaluation_of(run)
    if config is None:
        return None
    rows = MultimodalRLDataSource(config.prompts, shuffle=False).rows
    return config.evaluator(rows, sampling_of(run))


def sampling_of(run: ComposedRun) -> Any:  # Any: parameters of the modality
    """The recipe's sampling parameters: of its only stage, or of all stages by track."""
    own = {str(stage.track): instantiate(stage.sampling.node) for stage in run.stages}
    return StagedSamplingParams(stages=own) if run.is_staged else next(iter(own.values()))


def make_trainer(
    run: ComposedRun,
    runtime: Runtime,
    run_dir: Path,
    trackers: Sequence[Tracker],
    stop: threading.Event,
    clock: PhaseClock | None = None,
    published: Recipe | None = None,
) -> Trainer:
    """The trainer of a recipe on a runtime. published: see `run_recipe`."""
    recipe, file = run.resolved, run.file
    shown = recipe if published is None else published
    evaluator = make_evaluator(run)
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
    watching = GuardrailConfig() if run.guardrails is None else instantiate(run.guardrails.node)
    parity = None
    if evaluator is not None and watching.parity_interval is not None:
        rows = evaluator.rows[: min(watching.parity_samples, evaluator.config.num_samples)]
        parity = Parity(rows, evaluator.params, evaluator.config.batch_size)
    if (note := ignored_prompt(run)) is not None:
        logger.warning("%s", note)
    plan = _residency_plan(run)
    if plan and file.schedule.kind != "hybrid":
        backends = [role_name(name, "backend", run.all_policies) for name in run.policies]
        clock.before = DeviceResidents(plan, runtime, backends).enter
    return assemble(
        runtime,
        settings,
        modality=instantiate(run.modality.node),
        data=build_part(run.data, components()["data"], {"seed": run.seed}),
        sampling=sampling_of(run),
        advantages=instantiate(run.advantages.node),
        evaluator=evaluator,
        guardrails=functools.partial(
            Guardrails,
            watching,
            scorers=[name for name, weight in scorer_weights(recipe["reward"]).items() if weight >= 0],
            learns_from_reward=run.advantages.get("kind") != "equal"
            and not all(algorithm.ability("teacher_option") for algorithm in _algorithms(run)),
        ),
        parity=parity,
        takes_older=file.schedule.takes_older,
        trackers=trackers,
        run_dir=run_dir,
        config=shown,
        digests=digests_of(recipe, shown),
        stop=stop,
        selection=SampleSelection() if run.selection is None else instantiate(run.selection.node),
        sync=runtime.role("sync", SyncRole) if _pushes(run) else None,
        scored_track=run.scored_track,
        samples=file.samples,
        track_advantages={
            str(stage.track): instantiate(stage.advantages.node)
            for stage in run.stages
            if stage.advantages is not run.advantages and stage.track in run.all_policies[stage.policy].algorithms
        },
        clock=clock,
        collects_ahead=file.schedule.kind != "sync",
        loop=_loop_of(run, settings, run_dir, runtime),
        experience=_experience_of(run, runtime, settings),
        scouting=None if file.scouts is None else Scouting(runtime, file.scouts, clock),
        keeps_groups=bool(groupwise_scorers(run)),
    )


def _experience_of(run: ComposedRun, runtime: Runtime, settings: TrainerSettings) -> Experience | None:
    given = run.file.schedule.experience
    if given is None:
        return None
    buffer = ReplayBuffer(
        capacity=given.capacity, order=given.order, max_staleness=given.max_staleness, seed=settings.seed
    )
    return Experience(
        runtime,
        buffer,
        groups_per_rollout=given.groups_per_rollout,
        best_of=given.best_of,
        num_updates=settings.num_updates,
    )


def _loop_of(run: ComposedRun, settings: TrainerSettings, run_dir: Path, runtime: Runtime) -> Callable[..., Trainer]:
    schedule = run.file.schedule
    if schedule.kind == "sync":
        return lambda **parts: build_part(run.trainer, components()["trainer"], parts)
    given: dict[str, Any] = {  # Any: arguments of the loop
        "groups_per_request": schedule.groups_per_request,
        "requests_at_once": schedule.requests_at_once,
        "log": OrderLog(run_dir / REQUESTS),
        "order": order_of(schedule, settings.batch_size, settings.num_rollouts),
    }
    if schedule.kind == "pipelined":
        return functools.partial(PipelinedTrainer, **given)
    given |= {
        "max_staleness": schedule.staleness,
        "window": schedule.window_of(settings.batch_size),
        "too_old": schedule.too_old,
        "cuts_calls": schedule.on_push != "finish",
    }
    if run.file.save.in_flight:
        folders = {"folder": run_dir / IN_FLIGHT, "checkpoints": run_dir / "checkpoints"}
        given["in_flight"] = functools.partial(InFlight, runtime=runtime, **folders)
    if schedule.kind == "hybrid":
        return functools.partial(HybridTrainer, lending=Lending(runtime.lent, _handover(run, runtime)), **given)
    return functools.partial(AsyncTrainer, **given)


def _handover(run: ComposedRun, runtime: Runtime) -> Handover:
    residency = run.file.residency
    backends = [runtime.role(role_name(name, "backend", run.all_policies), BackendRole) for name in run.policies]
    moves = backends if residency.offload_optimizer else []
    return Handover(
        cuts_calls=run.is_staged or bool(run.stages[0].engine.ability("can_resume")),
        sleeps=residency.sleep_engine,
        leave=lambda: [backend.offload(["optimizer"]) for backend in moves],
        come=lambda: [backend.onload(["optimizer"]) for backend in moves],
    )


def _pushes(run: ComposedRun) -> bool:
    """True if some policy is pushed to its engine."""
    return any(run.all_policies[stage.policy].sync is not None for stage in run.stages)


def assemble(
    runtime: Runtime,
    settings: TrainerSettings,
    *,
    modality: Modality[Any],  # Any: as the sampling parameters
    data: MultimodalRLDataSource,
    sampling: Any,  # Any: parameters of the modality
    advantages: Advantages,
    evaluator: Evaluator | None,
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
    samples: Samples | None = None,
    collects_ahead: bool = False,
    experience: Experience | None = None,
    takes_older: bool = False,
    parity: Parity | None = None,
    scouting: Scouting | None = None,
    keeps_groups: bool = False,
) -> Trainer:
    """Collector, learner and run record on a runtime, and the loop that joins them.

    guardrails: makes the guardrails, given `exact_ratios` of the stack, or none where samples may be older than the
    weights that train. collects_ahead, keeps_groups, takes_older: see `Collector` and `Schedule`.
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
        collects_ahead=collects_ahead,
        scouting=scouting,
        keeps_groups=keeps_groups,
    )
    watching = guardrails(exact_ratios=[] if takes_older else stack.exact_ratios())
    learner = Learner(runtime, guardrails=watching, clock=clock, sync=sync, parity=parity, scored_track=scored_track)
    record = RunRecord(
        runtime,
        settings,
        evaluator=evaluator,
        trackers=trackers,
        run_dir=run_dir,
        config=config,
        digests=digests or {},
        clock=clock,
        scored_track=scored_track,
        samples=samples,
    )
    return loop(
        settings=settings,
        collector=collector,
        learner=learner,
        record=record,
        clock=clock,
        stop=stop,
        experience=experience,
    )


def _residency_plan(run: ComposedRun) -> dict[Resident, Stay]:
    return residency_plan(
        run.file.residency,
        has_own_weights=all(stage.engine.ability("has_own_weights") for stage in run.stages),
        is_scored_meanwhile=bool(run.reward.get("is_async")),
        trains_through_reward=any(algorithm.ability("requires_reward_gradient") for algorithm in _algorithms(run)),
    )


def _algorithms(run: ComposedRun) -> list[Part]:
    return [algorithm for policy in run.policies.values() for algorithm in policy.algorithms.values()]
