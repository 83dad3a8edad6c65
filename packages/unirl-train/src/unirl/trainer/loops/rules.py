"""Rules of a recipe's `schedule`: what overlaps stands apart, and what may be old is corrected."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from unirl.algorithms.advantage_presets import with_preset
from unirl.config.placement import REWARD, TRAIN, group_of, groups_of_run
from unirl.config.runs import ComposedRun
from unirl.config.schema import DEFAULT_POLICY, Schedule
from unirl.trainer.loops.order import order_of
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine, Messages, Part, Stage

ADVANTAGES = "unirl.algorithms.advantages.AdvantageConfig"
LOOP = "unirl.trainer.base.Trainer"
AHEAD = "collects while others are trained on"
LENT = ("sleep_engine", "offload_optimizer")
"""Fields of `residency` that make room on devices which are lent."""


def schedule_says_what_it_does(run: ComposedRun) -> Messages:
    """Keys of a schedule mean something for its kind, and no other loop is named."""
    schedule = run.file.schedule
    if schedule.kind == "sync":
        for key in ("max_staleness", "groups_per_request", "requests_at_once", "replay"):
            if getattr(schedule, key) is not None:
                yield f"schedule.{key} does nothing with schedule.kind: sync. Set kind: async, or remove it."
        if schedule.window:
            yield "schedule.window does nothing with schedule.kind: sync. Set kind: async, or remove it."
        return
    if schedule.kind == "pipelined":
        if schedule.max_staleness not in (None, 0):
            yield f"schedule.max_staleness = {schedule.max_staleness}, but pipelined is 0. Set kind: async."
        if schedule.groups_per_request in (None, run.batch_size):
            yield (
                f"schedule.kind = pipelined trains on requests of a rollout while others are made, and there is one of "
                f"batch_size = {run.batch_size} prompts. Set schedule.groups_per_request to a part of it."
            )
    if schedule.kind == "one_step_off":
        if schedule.max_staleness not in (None, 1):
            yield f"schedule.max_staleness = {schedule.max_staleness}, but one_step_off is 1. Set kind: async."
        if schedule.groups_per_request is not None:
            yield "schedule.groups_per_request cuts rollouts, which one_step_off takes whole. Set kind: async."
    if run.trainer.path != LOOP:
        yield (
            f"trainer._target_ = {run.trainer.path} and schedule.kind = {schedule.kind} both name the loop. Remove one "
            "of them."
        )


def repeated_order_fits(run: ComposedRun, machine: Machine) -> Messages:
    """The file of a repeated order is there, and has this run's requests."""
    schedule = run.file.schedule
    if schedule.kind == "sync" or schedule.replay is None or run.batch_size % (schedule.groups_per_request or 1):
        return
    try:
        order_of(schedule, run.batch_size, run.file.num_rollouts)
    except ConfigError as error:
        yield str(error)


def engines_sample_meanwhile(run: ComposedRun) -> Messages:
    """Engines and rewards work while the policy trains: with weights and workers that do not train."""
    kind = run.file.schedule.kind
    if kind == "sync":
        return
    train = groups_of_run(run)[0]
    is_ray = run.file.runtime == "ray"
    for stage in run.stages:
        if stage.policy in run.policies and not stage.engine.ability("has_own_weights"):
            yield (
                f"schedule.kind = {kind} {AHEAD}, but {stage.engine.name} samples with the very weights that train. "
                "Take an engine that is pushed to (parts/engine=replica), or schedule.kind: sync."
            )
        elif is_ray and stage.at in train.holds:
            yield (
                f"schedule.kind = {kind} {AHEAD}, but {stage.engine.name} is in the workers that train, which do one "
                "thing at a time. Give it its own devices (placement.train, placement.rollout)."
            )
    if is_ray and group_of(run, REWARD) == group_of(run, TRAIN):
        yield (
            f"schedule.kind = {kind} {AHEAD}, but the reward is in the workers that train, which do one thing at a "
            "time. Give it its own devices (placement.reward), or let it stand with the engine."
        )
    if is_ray and run.file.cluster.transport != "ray":
        yield (
            f"cluster.transport = {run.file.cluster.transport} hands samples from worker to worker, and with "
            f"schedule.kind = {kind} they wait in between. Set cluster.transport: ray."
        )
    residency = run.file.residency
    for name in [field.name for field in dataclasses.fields(residency) if getattr(residency, field.name)]:
        if kind == "hybrid" and name in LENT:
            continue
        yield (
            f"residency.{name}: true moves things off the device between phases, which overlap with schedule.kind = "
            f"{kind}. Remove one of them."
        )


def hybrid_has_devices_to_lend(run: ComposedRun) -> Messages:
    """Engines stand in served pools, of which some have devices of what trains, and others besides."""
    if run.file.schedule.kind != "hybrid":
        return
    instead = "Or set schedule.kind: async"
    train, *others = groups_of_run(run)
    served = [group for group in others if group.given.is_served]
    for stage in run.stages:
        if not any(stage.at in group.holds for group in served):
            yield (
                f"schedule.kind = hybrid lends devices to members of served pools, and {stage.engine.name} of "
                f"{stage.at} is in none. Name its devices in pools.<name>, with served: true. {instead}."
            )
            return
    shared = {group.name: set(group.devices) & set(train.devices) for group in served}
    if not any(shared.values()):
        yield (
            f"schedule.kind = hybrid lends devices that train to engines, but no served pool has any of "
            f"{train.given.shown}. Name some in {served[0].given.at} too. {instead}."
        )
    for group in served:
        members = group.given.members or len(group.devices)
        if shared[group.name] and members <= len(shared[group.name]):
            yield (
                f"schedule.kind = hybrid: each member of {group.given.shown}, {members} of them, is on a device that "
                "trains, so that nothing generates meanwhile. Name other devices too, or set schedule.kind: sync."
            )


def several_requests_are_of_served_pools(run: ComposedRun) -> Messages:
    """Several requests at once are made by engines that all stand in served pools; only they overtake each other."""
    schedule = run.file.schedule
    said = f"requests_at_once = {schedule.requests_at_once}" if (schedule.requests_at_once or 1) > 1 else None
    said = f"window = {schedule.window}" if schedule.window else said
    if schedule.kind == "sync" or said is None:
        return
    served = {at for group in groups_of_run(run) if group.given.is_served for at in group.holds}
    for stage in run.stages:
        if stage.at not in served:
            yield (
                f"schedule.{said}, but {stage.engine.name} takes one request at a time. Put it "
                "in a served pool (pools.<name>.served: true), or remove the key."
            )
            return


def what_a_push_cuts_short_goes_on(run: ComposedRun) -> Messages:
    """Engines continue what a push has cut short, and pushes come while they generate."""
    schedule = run.file.schedule
    if schedule.on_push == "finish":
        return
    said = f"schedule.on_push = {schedule.on_push}"
    if not schedule.staleness:
        yield (
            f"{said} does nothing where the engine waits for training (schedule.kind = {schedule.kind}, max_staleness "
            f"= {schedule.staleness}). Set schedule.max_staleness (parts/schedule=async), or on_push: finish."
        )
    elif schedule.replay is not None:
        yield (
            f"{said} ends calls after as many tokens or steps as there are, so that no order can be repeated. Remove "
            "it or schedule.replay."
        )
    if not any(stage.engine.ability("can_resume") for stage in run.stages):
        names = [stage.engine.name + (f" of {stage.at}" if run.is_staged else "") for stage in run.stages]
        do = "do" if len(names) > 1 else "does"
        yield f"{said}, but {' and '.join(names)} {do} not continue what was ended early. Set on_push: finish."
    elif (noting := _notes_experts(run)) is not None:
        yield (
            f"{said} has several policies denoise a sample, and {noting.at}.replays_experts notes the experts of one. "
            "Set one of them otherwise."
        )
    elif schedule.on_push == "in_place" and run.is_staged:
        yield (
            f"{said} keeps keys and values of requests of one stage, and this run has {len(run.stages)}. Set on_push: "
            "retract."
        )
    elif schedule.on_push == "in_place":
        yield from _keeps_cache(run, run.stages[0])


def _notes_experts(run: ComposedRun) -> Part | None:
    """A pipeline that notes the experts of samples which a push may cut short while they are denoised."""
    for stage in run.stages:
        if stage.engine.ability("can_resume") and not stage.sampling.ability("samples_tokens"):
            pipelines = run.all_policies[stage.policy].pipelines.values()
            if noting := next((pipeline for pipeline in pipelines if pipeline.get("replays_experts")), None):
                return noting
    return None


def _keeps_cache(run: ComposedRun, stage: Stage) -> Messages:
    """The engine keeps keys and values, and gets what it has kept back, with the next weights of the same policy."""
    said, instead = "schedule.on_push = in_place keeps keys and values", "Set on_push: retract."
    if not stage.sampling.ability("samples_tokens"):
        yield f"{said}, and {stage.engine.name} has none: denoising goes on from a latent with retract too. {instead}"
    elif "keeps_cache" not in stage.engine.keywords:
        yield f"{said}, which {stage.engine.name} drops when a text is ended early. {instead}"
    if stage.turns is not None:
        yield f"{said} of single texts, and {stage.turns.at} takes turns with an environment. {instead}"
    if (stage.engine.number("num_instances") or 1) > 1:
        yield (
            f"{said}, and {stage.engine.at}.num_instances = {stage.engine.get('num_instances')} lets another instance "
            "continue a text. Put engines of one instance in a served pool (pools.<name>.served: true), or set "
            "on_push: retract."
        )
    copy = None if run.evaluation is None else run.evaluation.node.get("policy")
    if copy not in (None, DEFAULT_POLICY):
        yield (
            f"{said}, and eval.policy = {copy} has the engine take other weights while texts are kept. Remove "
            f"eval.policy, or {instead.lower()}"
        )


def an_order_replaces_no_group(run: ComposedRun) -> Messages:
    """Groups that replace others have no place in an order: their prompts and weights are those of the moment."""
    replaces = run.selection is not None and run.selection.get("dynamic_sampling")
    if run.file.schedule.replay is not None and replaces:
        yield (
            "selection.dynamic_sampling = true replaces groups whose rewards are all equal, by prompts and weights "
            "that depend on when that is, so that no order can be repeated. Remove it or schedule.replay."
        )


def what_is_too_old_can_be(run: ComposedRun) -> Messages:
    """Requests become too old only where they are overtaken, and no order is repeated where they are."""
    schedule = run.file.schedule
    said = f"schedule.too_old = {schedule.too_old}"
    if schedule.too_old == "wait":
        return
    if not schedule.window or schedule.kind == "sync":
        yield (
            f"{said} does nothing without schedule.window: slots admit no request that would be too old, and none is "
            "overtaken. Set schedule.window, or too_old: wait."
        )
    elif schedule.replay is not None:
        yield f"{said} depends on who is late, so that no order can be repeated. Remove it or schedule.replay."


def steps_of_rollouts_that_differ(run: ComposedRun, key: str) -> Messages:
    """What trains samples of several rollouts together, as the setting `key` does, has the same steps in each."""
    for stage in run.stages:
        scheduler = stage.sampling.inner.get("scheduler")
        if scheduler is not None and scheduler.ability("varies") and stage.sampling.get("sde_indices") is None:
            yield (
                f"{key} puts samples of several rollouts together, and {scheduler.name} gives each rollout other "
                "stochastic steps. Remove one of them."
            )


def a_window_overtakes_something(run: ComposedRun) -> Messages:
    """A window holds more than one request, which may be older, and samples of several rollouts fit together."""
    schedule = run.file.schedule
    if not schedule.window or schedule.kind == "sync":
        return
    if not schedule.staleness:
        yield f"schedule.window = {schedule.window} does nothing with max_staleness: 0. Raise it, or remove the window."
    elif schedule.window_of(run.batch_size) == 1:
        count = run.batch_size // (schedule.groups_per_request or run.batch_size)
        yield (
            f"schedule.window = {schedule.window} of the {count} requests of a rollout is less than 2, so that none is "
            "overtaken. Raise it, or set a smaller schedule.groups_per_request."
        )
    yield from steps_of_rollouts_that_differ(run, "schedule.window")


def requests_divide(run: ComposedRun) -> Messages:
    """Requests of a schedule make whole rollouts, and their samples divide over even pools."""
    size = run.file.schedule.groups_per_request
    kind = run.file.schedule.kind
    if size is None or kind not in ("async", "pipelined"):
        return
    if run.batch_size % size:
        yield f"schedule.groups_per_request = {size} does not divide batch_size = {run.batch_size}. Change one of them."
        return
    for group in groups_of_run(run)[0 if kind == "pipelined" else 1 :]:
        samples, count = size * run.samples_per_prompt, len(group.devices)
        if not group.given.is_served and samples % count:
            yield (
                f"schedule.groups_per_request * {run.samples_key} = {size} * {run.samples_per_prompt} = {samples} is "
                f"not divisible by the {count} devices of {group.given.shown}. Change one of them."
            )


def parts_add_up_to_one_update(run: ComposedRun) -> Messages:
    """Requests that are trained on one after the other make one update of one track, and compare samples of groups."""
    if run.file.schedule.kind != "pipelined":
        return
    why = "schedule.kind = pipelined adds up the gradients of requests"
    if run.file.schedule.experience is not None:
        yield f"{why}, and schedule.experience mixes whole rollouts. Remove one of them."
    for policy in run.policies.values():
        stack = policy.stack
        for key in ("num_updates_per_batch", "num_epochs"):
            if stack.get(key, 1) != 1:
                yield f"{why} in one update, {stack.at}.{key} = {stack.get(key)}. Set it to 1, or kind: sync."
        if len(policy.algorithms) > 1:
            yield f"{why} of one track, {stack.at} trains {', '.join(policy.algorithms)}. Set kind: sync."
        for own in policy.algorithms.values():
            if own.ability("learns_value"):
                yield f"{why}, which the critic of {own.name} does not. Set kind: sync."
            if own.ability("trains_copies"):
                yield f"{why}, and {own.name} trains on a whole update before it. Set kind: sync."
            correction = own.node.get("rollout_correction")
            if isinstance(correction, Mapping) and correction.get("m2_threshold") is not None:
                yield f"{why}, and {own.at}.rollout_correction judges an update as a whole. Set kind: sync."
    for own in {stage.advantages.at: stage.advantages for stage in run.stages}.values():
        yield from _compares_groups_alone(own, why)


def _compares_groups_alone(own: Part, why: str) -> Messages:
    """Advantages of a request are those that it has in the whole rollout."""
    if own.get("kind") == "equal":
        return
    if own.path != ADVANTAGES:
        yield f"{why}, and {own.name} may compare samples of all of a rollout. Take {ADVANTAGES}, or kind: sync."
        return
    options = with_preset(own)
    wide = {key: options.get(key) for key in ("center", "scale") if options.get(key) in ("batch", "residual")}
    if options.get("multi_reward") == "gdpo":
        wide["multi_reward"] = "gdpo"
    if wide:
        said = ", ".join(f"{own.at}.{key} = {value}" for key, value in wide.items())
        yield f"{why}, and {said} needs all of a rollout. Take statistics of groups (preset: flow_grpo), or kind: sync."


def stale_samples_are_corrected(run: ComposedRun) -> Messages:
    """Objectives that need samples of the weights that train, or their correction, get them."""
    schedule = run.file.schedule
    parts = [algorithm for policy in run.policies.values() for algorithm in policy.algorithms.values()]
    for own in parts:
        if schedule.kind != "sync" and own.ability("requires_reward_gradient"):
            yield (
                f"{own.name} samples while it trains, to differentiate through both, so that nothing can be collected "
                "ahead. Set schedule.kind: sync."
            )
        elif schedule.experience is not None and own.ability("requires_reward_gradient"):
            yield (
                f"{own.name} samples while it trains, to differentiate through both, so that no earlier sample can be "
                "trained on. Set schedule.experience: null."
            )
        elif not schedule.takes_older:
            yield from _bounds_age(own)
        elif not own.takes_any and not own.ability("takes_stale_samples"):
            yield from _corrected(own, schedule)
    if schedule.takes_older and run.guardrails is not None and run.guardrails.node.get("action") == "rollback":
        where = "in flight (schedule.max_staleness > 0)" if schedule.staleness else "kept (schedule.experience)"
        yield (
            f"guardrails.action: rollback returns to older weights, and samples of the newer ones are {where}. Set "
            "action: stop, and resume."
        )


def _bounds_age(own: Part) -> Messages:
    correction = own.node.get("rollout_correction")
    for key in ("max_staleness", "noise_floor"):
        if isinstance(correction, Mapping) and correction.get(key) is not None:
            yield (
                f"{own.at}.rollout_correction.{key} = {correction[key]} drops what is old, but samples are never older "
                "than the weights that train. Remove it, or set schedule.max_staleness (parts/schedule=async) or "
                "schedule.experience."
            )


def _corrected(own: Part, schedule: Schedule) -> Messages:
    again, staleness = schedule.experience, schedule.staleness
    is_unbounded = again is not None and again.max_staleness is None
    oldest = max(staleness, 0 if again is None else again.max_staleness or 0)
    age = f"{'any number of' if is_unbounded else oldest} versions old"
    instead = f"schedule.{'max_staleness: 0' if again is None else 'experience: null'}"
    if "rollout_correction" not in own.keywords:
        yield (
            f"schedule lets samples be {age}, which {own.name} cannot correct. Set {instead}, or take another "
            "algorithm."
        )
    elif not own.get("rollout_correction") and own.get("old_logp_source") != "rollout":
        yield (
            f"schedule lets samples be {age}, and {own.at} compares each policy with a replay by newer weights, so "
            f"nothing corrects for those that sampled. Set {own.at}.rollout_correction (parts/correction=truncated), "
            f"or {instead}."
        )


MACHINE_RULES = (repeated_order_fits,)
RULES = (
    schedule_says_what_it_does,
    engines_sample_meanwhile,
    hybrid_has_devices_to_lend,
    several_requests_are_of_served_pools,
    what_a_push_cuts_short_goes_on,
    an_order_replaces_no_group,
    what_is_too_old_can_be,
    a_window_overtakes_something,
    requests_divide,
    parts_add_up_to_one_update,
    stale_samples_are_corrected,
)
