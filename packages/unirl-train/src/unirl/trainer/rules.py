"""Rules of a whole run: divisible sizes, CPU budgets, the metric of the best checkpoint, a writable run directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from unirl.config.placement import groups_of_run
from unirl.config.runs import ComposedRun
from unirl.config.schema import ENABLED
from unirl.tracking.libraries import LIBRARIES, how_to_get, is_installed
from unirl.train.backend.rules import layers_kept, topology_problem, unproven_with_layers
from unirl.train.checkpoint.stores import MissingLibraryError, store_of
from unirl.types.errors import ConfigError
from unirl.types.recipe import TARGET, Fault, Machine, Messages, Stage


def geometry_divides(run: ComposedRun) -> Messages:
    """Samples divide over devices, and each device's samples over the updates."""
    prompts, repeats, per_prompt = run.batch_size, run.samples_per_prompt, run.samples_key
    best_of = None if run.selection is None else run.selection.node.get("best_of")
    if best_of is not None and best_of > repeats:
        yield f"selection.best_of = {best_of} exceeds {per_prompt} = {repeats}. Lower it."
        return
    group = groups_of_run(run)[0]
    total, devices, key = prompts * repeats, len(group.devices), group.given.at
    over = key if key == "num_devices" else f"devices of {group.given.shown}"
    sharing = max(run.policies.values(), key=lambda policy: policy.ranks_per_sample)
    shared = sharing.ranks_per_sample
    if shared > 1:
        if devices % shared:
            return  # `topologies_fit` says so
        devices //= shared
        over = f"the {devices} groups of {sharing.sharing} devices"
        key = f"{key}, {sharing.sharing_option}"
    product = f"batch_size * {per_prompt} = {prompts} * {repeats} = {total}"
    is_cut = best_of is None and total % devices
    for policy in run.policies.values():
        name, updates = f"{policy.stack.at}.num_updates_per_batch", policy.stack.get("num_updates_per_batch", 1)
        if best_of is not None and (prompts * best_of) % (devices * updates):
            yield (
                f"batch_size * selection.best_of = {prompts} * {best_of} samples do not divide into {over} * "
                f"{name} = {devices * updates}. Change one of them."
            )
        if best_of is None and not is_cut and (total // devices) % updates:
            yield (
                f"{product} is {total // devices} samples a device, not divisible by {name} = {updates}. Change one "
                f"of: batch_size, {per_prompt}, {name}."
            )
    if total % devices:
        count = over if shared > 1 else group.given.shown if key == "num_devices" else f"the {devices} {over}"
        yield (f"{product} is not divisible by {count}. Change one of: batch_size, {per_prompt}, {key}.")


def children_can_be_chosen(run: ComposedRun) -> Messages:
    """Every trained stage that grows from another makes as many samples as are chosen of them."""
    best_of = None if run.selection is None else run.selection.get("best_of_children")
    if best_of is None:
        return
    left = {track for policy in run.policies.values() for track in policy.resting}
    grown = [s for s in run.stages if s.grows_from is not None and s.policy in run.policies and s.track not in left]
    if not grown:
        yield f"selection.best_of_children = {best_of}, but no trained stage grows from another. Remove it."
    for stage in grown:
        number = stage.sampling.get("samples_per_prompt", 1)
        if best_of > number:
            yield (
                f"selection.best_of_children = {best_of} exceeds {stage.sampling.at}.samples_per_prompt = {number}. "
                "Lower it, or make more."
            )


def topologies_fit(run: ComposedRun) -> Messages:
    """The axes of every policy multiply to the devices that train, and all policies cut a batch alike."""
    num_devices, sizes = len(groups_of_run(run)[0].devices), dict[str, tuple[int, int]]()
    for policy in run.policies.values():
        at, topology = f"{policy.backend.at}.topology", policy.backend.inner.get("topology")
        sizes[policy.prefix] = policy.ranks_of_tokens, policy.ranks_of_layers
        if topology is None:
            if policy.backend.node.get("topology"):
                yield f"{at} has no {TARGET}. Add {TARGET}: unirl.train.configs.TrainTopology."
            continue
        axes = (topology.get(axis) for axis in ("dp_replicate", "dp_shard", "sp", "tp", "ep", "ring"))
        problem = topology_problem(*axes, num_devices)
        if problem is not None:
            yield f"{at}.{problem}"
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{policy.backend.at}.{policy.sharing}" for policy in run.policies.values())
        yield f"{shown}: policies that train on the same ranks share samples alike. Set them to one number."


def tokens_can_be_spread(run: ComposedRun) -> Messages:
    """Ranks that each have a part of the tokens train a model whose tokens can be spread."""
    for policy in (each for each in run.policies.values() if each.ranks_of_tokens > 1):
        at = f"{policy.backend.at}.topology.sp = {policy.ranks_of_tokens}"
        if not policy.bundle.ability("spreads_tokens"):
            because = policy.bundle.ability("kept_whole")
            yield (
                f"{at}, but the tokens of {policy.bundle.name} cannot be spread over ranks{because and ': '}{because}. "
                "Set it to 1."
            )
        for pipeline in policy.pipelines.values():
            if pipeline.get("packed") is False:
                yield f"{at} spreads packed rows, and {pipeline.at}.packed: false pads them. Set it to null, or sp: 1."
        if (policy.backend.get("fsdp") or {}).get("compile"):
            yield (
                f"{at} exchanges tokens inside blocks that {policy.backend.at}.fsdp.compile compiles. Set sp: 1, or "
                "compile: false."
            )


def shared_samples_are_sampled_alike(run: ComposedRun) -> Messages:
    """Ranks that share samples sample them themselves, with equal bits, or get them from another pool."""
    train = groups_of_run(run)[0]
    sharing = next((policy for policy in run.policies.values() if policy.ranks_per_sample > 1), None)
    if sharing is None:
        return
    for stage in run.stages:
        if stage.engine.ability("has_own_weights") and stage.at in train.holds:
            yield (
                f"{stage.engine.at} samples with a copy of the model on every device that trains, where ranks that "
                f"share samples ({sharing.sharing_option}) would each sample their own. Use the trainside "
                "engine, or give it its own pool."
            )


def layers_can_be_divided(run: ComposedRun) -> Messages:
    """Ranks that have layers together train a model whose layers can be divided, with options that are proven."""
    for policy in (each for each in run.policies.values() if each.ranks_of_layers > 1):
        backend = policy.backend
        at = f"{backend.at}.topology.tp = {policy.ranks_of_layers}"
        if not policy.bundle.ability("cuts_layers"):
            yield layers_kept(at, policy.bundle.name, policy.bundle.ability("kept_whole"))
        for pipeline in policy.pipelines.values():
            if pipeline.get("packed") is False:
                yield f"{at} is proven with packed rows, and {pipeline.at}.packed: false pads them. Set it to null."
        given = {section: backend.get(section) for section in ("fsdp", "optimizer", "lora")}
        yield from unproven_with_layers(policy.ranks_of_layers, given, f"{backend.at}.")


def experts_can_be_spread(run: ComposedRun) -> Messages:
    """Ranks that have experts together train a model that has some."""
    for policy in (each for each in run.policies.values() if each.ranks_of_experts > 1):
        at = f"{policy.backend.at}.topology.ep = {policy.ranks_of_experts}"
        if not policy.bundle.ability("spreads_experts"):
            yield f"{at}, but {policy.bundle.name} has no experts that can be spread over ranks. Set it to 1."
        if (policy.backend.get("fsdp") or {}).get("compile"):
            yield (
                f"{at} exchanges tokens inside blocks that {policy.backend.at}.fsdp.compile compiles. Set ep: 1, or "
                "compile: false."
            )


def tracks_have_algorithms(run: ComposedRun) -> Messages:
    """Every track of the engine is trained, unless its policy only samples or the recipe excludes it, and every
    algorithm's track is made by an engine."""
    of_stages = {track: stage.policy for stage in run.stages for track in made_tracks(stage)}
    made = list(of_stages)
    if not made:
        return
    left = {track for track, name in of_stages.items() if name in run.frozen}
    left.update(track for policy in run.policies.values() for track in policy.resting)
    trained = {track: policy for policy in run.policies.values() for track in policy.algorithms}
    wrong = [track for track in trained if track not in made]
    for track in wrong:
        part, stack = trained[track].algorithms[track], trained[track].stack
        if part.at.endswith("algorithm"):  # the only algorithm; the stack names its track
            yield (
                f"{stack.at}.track = {track}, but the engine makes the track {', '.join(made)}. Set {stack.at}.track: "
                f"{made[0]}."
            )
        else:
            yield f"{part.at}: no engine makes the track {track}, there is {', '.join(made)}. Rename or remove it."
    if run.scored_track is not None and run.scored_track not in made:
        yield (
            f"reward.track = {run.scored_track}, but the engine makes the track {', '.join(made)}. Set reward.track to "
            "one that is made."
        )
    for track in made if not wrong else ():
        if track not in trained and track not in left:
            yield (
                f"the engine makes the track {track}, which no algorithm trains. Add algorithms.{track}. Null there "
                "leaves it untrained."
            )


def made_tracks(stage: Stage) -> list[str]:
    """Tracks that a stage makes; for an engine with an argument `tracks` those; empty if its class does not declare
    them."""
    several = stage.engine.get("tracks")
    return list(several) if several else [stage.track] if stage.track is not None else []


def one_policy_names_one(run: ComposedRun) -> Messages:
    """Each track is trained by only one policy."""
    owners: dict[str, str] = {}
    for policy in run.policies.values():
        for track, part in policy.algorithms.items():
            if track in owners:
                yield (
                    f"{part.at}: the track {track} is trained by {owners[track]} already. Give every track one "
                    "algorithm."
                )
            owners[track] = part.at


def cpu_seconds_are_of_one_process(run: ComposedRun) -> Messages:
    """Settings in CPU seconds measure the trainer's process only, so they need a local run and an engine in that
    process."""
    evaluated = None if run.evaluation is None else run.evaluation.number("interval_cpu_s")
    for name, value in (("max_cpu_s", run.file.max_cpu_s), ("eval.interval_cpu_s", evaluated)):
        if value is not None and run.runtime != "local":
            yield f"{name} = {value} counts CPU seconds of one process. Set runtime: local, or {name}: null."
        for engine in [stage.engine for stage in run.stages if value is not None and run.runtime == "local"]:
            if engine.ability("has_own_weights"):
                yield (
                    f"{name} = {value} counts CPU seconds of the trainer's process, {engine.name} samples in "
                    f"another: rollouts would seem free. Set {name}: null, or take a trainside engine."
                )


def best_metric_has_its_scorer(run: ComposedRun) -> Messages:
    """The metric that chooses the best checkpoint comes from a scorer of the recipe."""
    scorers, metric = run.reward.get("scorers"), run.file.save.best_metric
    has_own_evaluation = TARGET in (run.resolved.get("eval") or {})
    if "/" not in metric or not isinstance(scorers, Mapping) or has_own_evaluation:
        return
    scorer = metric.split("/")[0]
    if scorer not in scorers:
        yield (
            f"save.best_metric = {metric} is a number of the scorer {scorer!r}, reward.scorers has "
            f"{', '.join(map(str, scorers))}. Set save.best_metric: reward, or a number of a scorer that is there."
        )


def the_mirror_can_be_used(run: ComposedRun, machine: Machine) -> Messages:
    """The URL of copies of checkpoints is of a kind whose library is here."""
    if run.file.save.mirror is not None:
        try:
            store_of(run.file.save.mirror)
        except MissingLibraryError as error:
            yield str(error)
        except ConfigError as error:
            yield Fault(error)


def run_dir_writable(run: ComposedRun, machine: Machine) -> Messages:
    """The run directory can be created and written."""
    run_dir = Path(run.file.run_dir or "runs").expanduser().absolute()
    if run_dir.exists() and not run_dir.is_dir():
        yield f"run_dir = {run_dir} is a file. Set run_dir to a folder."
        return
    place = run_dir
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield f"run_dir = {run_dir} cannot be written: {place} is not a writable folder. Set run_dir elsewhere."


def trackers_have_their_libraries(run: ComposedRun, machine: Machine) -> Messages:
    """The libraries of the trackers that are switched on are installed."""
    for name, node in (run.resolved.get("trackers") or {}).items():
        known = LIBRARIES.get(node.get(TARGET)) if node and node.get(ENABLED, True) else None
        if known is not None and not is_installed(known):
            yield f"trackers.{name}: {how_to_get(known)}."


RULES = (
    cpu_seconds_are_of_one_process,
    geometry_divides,
    children_can_be_chosen,
    topologies_fit,
    tokens_can_be_spread,
    shared_samples_are_sampled_alike,
    layers_can_be_divided,
    experts_can_be_spread,
    tracks_have_algorithms,
    one_policy_names_one,
    best_metric_has_its_scorer,
)
MACHINE_RULES = (run_dir_writable, the_mirror_can_be_used, trackers_have_their_libraries)
