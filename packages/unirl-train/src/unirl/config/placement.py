"""Assigns devices to the worker groups of a run: parses `pools` and `placement`, and computes the shape of the cluster.

Devices are numbered through all nodes, from 0: with two nodes of four, node 1 has devices 4 to 7. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

from unirl.config.runs import ComposedRun
from unirl.config.schema import Cluster, Recipe
from unirl.types.device_kinds import kind_of, lacks
from unirl.types.errors import ConfigError
from unirl.types.recipe import Messages, Part, Stage

DEVICES_PER_NODE = 8
"""Devices per node of larger runs if neither num_nodes nor devices_per_node is set."""

ENV = "env"
"""Kind of the pools without devices."""
TRAIN, REWARD = "train", "reward"
"""Members of pools besides engines. Engines are named by their place: `engine` or `stages.<track>`."""

SCORERS = "reward.pools."
"""What the places of scorers with a separate pool begin with, before their name."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class ClusterShape:
    """The nodes of a run, which have equally many devices."""

    num_nodes: int
    devices_per_node: int
    node_groups: Mapping[str, tuple[int, ...]]
    """Name -> its nodes."""

    @property
    def num_devices(self) -> int:
        """Number of devices of all nodes."""
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True)
class Given:
    """Devices as written in a recipe, with their place."""

    at: str
    devices: str | int
    is_served: bool = False
    """True for a served pool, see `Pool.served`."""
    members: int | None = None
    samples_per_call: int | None = None

    @property
    def shown(self) -> str:
        """As shown in messages."""
        return f"{self.at} = {self.devices}"


@dataclass(frozen=True)
class WorkerGroup:
    """Workers with the same components, one per device."""

    pools: tuple[str, ...]
    """The pools with these devices."""
    holds: tuple[str, ...]
    """TRAIN, places of engines (`Stage.at`), REWARD."""
    devices: tuple[int, ...]
    given: Given
    """Devices of its first pool, as written."""

    @property
    def name(self) -> str:
        """Name of its first pool."""
        return self.pools[0]


def cluster_shape(num_devices: int, cluster: Cluster) -> ClusterShape:
    """The nodes that `num_devices` devices fill. Raises ConfigError if the devices do not fill them evenly, or a node
    group is empty or names a missing node."""
    num_nodes, per_node = cluster.num_nodes, cluster.devices_per_node
    if num_nodes is None:
        per_node = per_node or DEVICES_PER_NODE
        num_nodes = -(-num_devices // per_node)
        per_node = min(per_node, num_devices)
    elif num_nodes > num_devices:
        raise ConfigError(
            f"cluster.num_nodes = {num_nodes}, but num_devices = {num_devices}: every node needs a device. Raise "
            "num_devices, or lower cluster.num_nodes."
        )
    elif per_node is None:
        per_node = num_devices // num_nodes
    if num_nodes * per_node != num_devices:
        raise ConfigError(
            f"num_devices = {num_devices} does not fill {num_nodes} nodes of {per_node} devices. Change one of: "
            "num_devices, cluster.num_nodes, cluster.devices_per_node."
        )
    groups = {}
    for name, text in cluster.node_groups.items():
        key = f"cluster.node_groups.{name}"
        groups[str(name)] = numbers(str(text), key, num_nodes, "node", "cluster.num_nodes")
    return ClusterShape(num_nodes, per_node, groups)


def devices_of(text: str | int, key: str, shape: ClusterShape) -> tuple[int, ...]:
    """The devices that a pool names, in ascending order: "0-3", "4,5", "all", or with a node group "big:0-7",
    "big:all".

    Raises ConfigError, naming `key`, for invalid text, missing devices and unknown node groups.
    """
    group, separator, rest = str(text).rpartition(":")
    if not separator:
        return numbers(rest, key, shape.num_devices, "device", "num_devices")
    if group not in shape.node_groups:
        known = ", ".join(shape.node_groups) or "it names none"
        raise ConfigError(
            f"{key} = {text}: there is no node group {group!r} in cluster.node_groups ({known}). Add it there."
        )
    size = shape.devices_per_node
    devices = [node * size + device for node in shape.node_groups[group] for device in range(size)]
    chosen = numbers(rest, key, len(devices), f"device of {group}", f"cluster.node_groups.{group}")
    return tuple(devices[number] for number in chosen)


def devices_between(num_devices: int, first: str, last: str) -> str:
    """The devices between two fractions of all, such as 0 and 3/4, as a range: `${devices:8,0,3/4}` is 0-5.

    Raises ConfigError if a fraction cuts through a device, or if there is none between them.
    """
    begin, end = (Fraction(str(part)) * num_devices for part in (first, last))
    if begin.denominator != 1 or end.denominator != 1 or begin >= end:
        raise ConfigError(
            f"num_devices = {num_devices} has no whole devices from {first} to {last} of them. Change num_devices, or "
            "name the devices in placement.train and placement.rollout."
        )
    return f"{begin}-{end - 1}" if end - begin > 1 else f"{begin}"


def worker_groups(
    num_devices: int, cluster: Cluster, pools: Mapping[str, Given], members: Mapping[str, str | None]
) -> list[WorkerGroup]:
    """The worker groups of a run, the one of the pool `train` first. Pools with the same devices share their workers.

    pools: by name; if empty, one group holds everything.
    members: place of each stage or engine in the recipe, then "reward" -> its pool. By default an engine is in the pool
        `rollout`, or with the trainer if there is none; the reward is in the pool `reward`, or with the last engine if
        there is none, so that samples are scored where they are made; if that pool is `served`, with the trainer.
    Raises ConfigError as `cluster_shape` and `devices_of` do, and for unknown or empty pools or a missing pool `train`.
    """
    shape, known = cluster_shape(num_devices, cluster), ", ".join(pools) or "none"
    for place, pool in members.items():
        if pool is not None and pool not in pools:
            at = place if place.startswith(SCORERS) else f"{place}.pool"
            raise ConfigError(f"{at} = {pool}: there is no such pool; there are {known}. Add it to pools.")
    if not pools:
        return [
            WorkerGroup(("worker",), (TRAIN, *members), tuple(range(num_devices)), Given("num_devices", num_devices))
        ]
    if TRAIN not in pools:
        at = next(iter(pools.values())).at
        raise ConfigError(f"{at} is given, {at.replace(next(iter(pools)), TRAIN)} is not. Name its devices too.")
    devices = {name: devices_of(given.devices, given.at, shape) for name, given in pools.items()}
    default, pool_of = "rollout" if "rollout" in pools else TRAIN, {TRAIN: TRAIN}
    for place, pool in members.items():
        last = next(reversed(pool_of.values()))
        scored_at = TRAIN if pools[last].is_served else last
        pool_of[place] = pool or (default if place != REWARD else REWARD if REWARD in pools else scored_at)
    for name, given in pools.items():
        if name not in pool_of.values():
            raise ConfigError(
                f"{given.shown}: nothing stands in the pool {name}. Name it in stages.<track>.pool, engine.pool or "
                "reward.pool, or remove it."
            )
    sharing: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(pool_of.values()):  # `train` first
        sharing.setdefault(devices[name], []).append(name)
    return [
        WorkerGroup(
            tuple(names), tuple(place for place, pool in pool_of.items() if pool in names), own, pools[names[0]]
        )
        for own, names in sharing.items()
    ]


def groups_of_run(run: ComposedRun) -> list[WorkerGroup]:
    """The worker groups of a recipe. Raises as `worker_groups` does, and ConfigError if both `pools` and `placement`
    are set."""
    members = {stage.at: stage.pool for stage in run.stages}
    members[REWARD] = run.resolved[REWARD].get("pool")
    members.update({SCORERS + scorer: pool for scorer, pool in scorer_pools(run).items()})
    return worker_groups(run.num_devices, run.file.cluster, pools_of(run.file), members)


def num_shards(run: ComposedRun) -> int:
    """Parts that a batch is cut into where it trains: devices, less those that share samples (`topology.sp`, `tp`)."""
    shared = max(policy.ranks_per_sample for policy in run.policies.values())
    return max(1, len(groups_of_run(run)[0].devices) // shared)


def scorer_pools(run: ComposedRun) -> dict[str, str]:
    """The pools of single scorers, by scorer."""
    return {str(scorer): str(pool) for scorer, pool in (run.resolved[REWARD].get("pools") or {}).items()}


def pools_of(file: Recipe) -> dict[str, Given]:
    """The pools of devices of a recipe by name, from `pools` or `placement`. Raises ConfigError if both are set."""
    short = {item.name: getattr(file.placement, item.name) for item in fields(file.placement)}
    placed = {name: Given(f"placement.{name}", text) for name, text in short.items() if text is not None}
    named = {
        str(name): Given(
            f"pools.{name}.devices",
            pool["devices"],
            pool.get("served", False),
            pool.get("members"),
            pool.get("samples_per_call"),
        )
        for name, pool in file.pools.items()
        if pool.get("kind") != ENV
    }
    if placed and named:
        raise ConfigError(
            f"{next(iter(placed.values())).shown}: placement is the short form of pools, and both are there. Move it "
            f"to pools.{next(iter(placed))}.devices."
        )
    return placed or named


def shared_devices(groups: Sequence[WorkerGroup]) -> Iterator[tuple[WorkerGroup, WorkerGroup, tuple[int, ...]]]:
    """Pairs of groups with the devices that both have, on which they take turns."""
    for place, group in enumerate(groups):
        for other in groups[place + 1 :]:
            both = tuple(device for device in group.devices if device in other.devices)
            if both:
                yield group, other, both


# Rules ---------------------------------------------------------------------------------------------------------------


def groups_need_ray(run: ComposedRun) -> Messages:
    """Several worker groups need Ray."""
    groups = groups_of_run(run)
    if run.runtime != "ray" and len(groups) > 1:
        yield (
            f"{groups[0].given.shown}: groups of workers need runtime: ray; runtime is {run.runtime}. Change one of "
            "them."
        )


def engine_elsewhere_has_own_weights(run: ComposedRun) -> Messages:
    """An engine that samples with the trained weights is in the trainer's group."""
    train = groups_of_run(run)[0]
    for stage in run.stages:
        is_trained = stage.policy in run.policies
        if stage.at not in train.holds and is_trained and not stage.engine.ability("has_own_weights"):
            yield (
                f"{group_of(run, stage.at).given.shown} gives {_named(stage)} separate workers, but "
                f"{stage.engine.name} samples with the very weights that train. Take an engine that is pushed to "
                f"(parts/engine=replica), or let it stand in the pool train."
            )


def sizes_are_read_where_they_are_chosen(run: ComposedRun) -> Messages:
    """A stage that reads the sizes that a text chooses has the model of the pipeline that wrote the text."""
    for stage in run.stages:
        if stage.reads is None or stage.grows_from is None or not stage.reads.ability("reads_sizes"):
            continue
        parent = run.stage_of(stage.grows_from)
        if parent.policy != stage.policy and group_of(run, parent.at) != group_of(run, stage.at):
            yield (
                f"{stage.at}.pool: {stage.reads.name} reads sizes with the pipeline of {parent.track}, a model of "
                f"another policy on other devices ({group_of(run, parent.at).given.shown}). Let both stand in one pool."
            )


def async_reward_is_with_the_engine(run: ComposedRun) -> Messages:
    """Asynchronous scoring needs reward and engine in the same worker."""
    reward = group_of(run, REWARD)
    if run.reward.get("is_async") and not all(stage.at in reward.holds for stage in run.stages):
        yield (
            f"reward.is_async hands samples over within a worker, but {reward.given.shown} is not where the engine is. "
            "Set reward.is_async: false, or let the reward stand with the engine."
        )


def pools_of_scorers_fit(run: ComposedRun) -> Messages:
    """Scorers with separate pools are named, and one stays with the reward, which composes all of them."""
    named = scorer_pools(run)
    if not named:
        return
    scorers = run.reward.node.get("scorers")
    known = list(scorers) if isinstance(scorers, Mapping) else []
    if unknown := sorted(set(named) - set(known)):
        yield (
            f"reward.pools names {unknown}, which are no scorers; reward.scorers names {known}. Mend the names, or "
            "give reward.scorers as a mapping."
        )
    elif set(named) == set(known):
        yield (
            "reward.pools names every scorer, and one must stay to compose the reward. Leave one out; its pool is "
            "reward.pool."
        )
    if run.reward.get("is_async"):
        yield "reward.is_async hands samples over within a worker, which reward.pools splits. Remove one of them."
    for policy in run.policies.values():
        for algorithm in policy.algorithms.values():
            if algorithm.ability("requires_reward_gradient"):
                yield f"{algorithm.at} differentiates the reward where it trains, so remove reward.pools."


def one_worker_speaks_to_a_running_server(run: ComposedRun) -> Messages:
    """Only one worker pushes to a running server."""
    for stage in run.stages:
        url, group = stage.engine.get("url"), group_of(run, stage.at)
        if url is not None and len(group.devices) > 1:
            yield (
                f"{stage.engine.at}.url = {url} is one server, to which each of {len(group.devices)} workers would "
                "push. Give the engine one worker, which asks for all samples: name what trains in placement.train, "
                f"and set placement.rollout={group.devices[0]}; or remove {stage.engine.at}.url."
            )


def groups_that_overlap_take_turns(run: ComposedRun) -> Messages:
    """An engine that shares a GPU with the trainer sleeps while the policy trains; a running server is on separate
    devices. Engines of different groups do not share a GPU, since they are awake at the same time."""
    for one, other, both in shared_devices(groups_of_run(run)) if kind_of(run.device).is_accelerator else ():
        here = [s for s in run.stages if s.at in (*one.holds, *other.holds) and s.engine.get("url") is None]
        clash = f"{one.given.at} and {other.given.at} both have devices {list(both)}"
        if all(any(stage.at in group.holds for stage in here) for group in (one, other)):
            yield (
                f"{clash}, and engines of both are awake while samples are made. Give each separate devices, or both "
                "the same, so that they share their workers."
            )
        for stage in here:
            if not stage.engine.ability("can_sleep"):
                yield (
                    f"{clash}, but {stage.engine.name} cannot give their memory back (can_sleep). Give each group "
                    "separate devices."
                )
            elif not run.file.residency.sleep_engine:
                yield (
                    f"{clash}, where they take turns. Set residency.sleep_engine: true, or give each separate devices."
                )


def samples_divide_over_every_group(run: ComposedRun) -> Messages:
    """A batch divides over every even group; `unirl.trainer.rules` has further rules for the trainer's group."""
    prompts, repeats = run.batch_size, run.samples_per_prompt
    product = f"batch_size * {run.samples_key} = {prompts} * {repeats} = {prompts * repeats}"
    for group in groups_of_run(run)[1:]:
        if not group.given.is_served and (prompts * repeats) % len(group.devices):
            yield (
                f"{product} samples do not divide over the {len(group.devices)} devices of {group.given.shown}. Change "
                "one of them."
            )


def served_pools_hold_engines_alone(run: ComposedRun) -> Messages:
    """A served pool deals requests; what trains works on equal shares, and a reward is written where samples lie."""
    groups = groups_of_run(run)
    pools = pools_of(run.file)
    for name, pool in pools.items():
        at = pool.at.removesuffix(".devices")
        for key, value in {"samples_per_call": pool.samples_per_call, "members": pool.members}.items():
            if value is not None and not pool.is_served:
                yield f"{at}.{key} does nothing without {at}.served: true. Set it, or remove {key}."
        if not pool.is_served:
            continue
        group = next(group for group in groups if name in group.pools)
        for start, what in ((TRAIN, "what trains"), (REWARD, "the reward")):
            if any(place.startswith(start) for place in group.holds):
                yield f"{at}.served is for engines, but {what} stands there. Give it another pool, or remove served."
        even = [other for other in group.pools if not pools[other].is_served]
        if even:
            yield (
                f"{at}.served is true, and {pools[even[0]].at} names the same devices without it, so that both share "
                "their workers. Give each separate devices, or let both be served."
            )
        if (pool.members or 0) > len(group.devices):
            yield (
                f"{at}.members = {pool.members}, but {pool.shown} has {len(group.devices)} devices, each for one "
                "member. Lower it, or name more devices."
            )
        if run.file.cluster.transport == "rdt":
            yield (
                f"cluster.transport = rdt moves samples between workers that stay, and members of {at} may die. Set "
                "cluster.transport: ray."
            )


def push_transport_fits_the_placement(run: ComposedRun) -> Messages:
    """`sync.transport` is only set for engines in other workers, and suits their devices."""
    for stage in run.stages:
        sync = run.all_policies[stage.policy].sync
        if sync is not None and stage.engine.ability("has_own_weights"):
            yield from _transport_fits(sync, stage, run)


def _is_beside(sync: Part, stage: Stage) -> str:
    return (
        f"{sync.at}.transport = {sync.get('transport')} does nothing: {stage.engine.name} is with what trains. Remove "
        "it, or give the engine separate workers (placement.train, placement.rollout)."
    )


def _shares_memory(sync: Part, stage: Stage) -> Messages:
    """An engine with what trains has one process, which loads whole weights out of memory that it maps."""
    engine, at = stage.engine, f"{sync.at}.transport = ipc"
    if not engine.ability("shares_memory"):
        yield _is_beside(sync, stage)
        return
    if sync.ability("sends_adapters"):
        yield f"{at} does nothing: adapters are small files. Remove it, or push whole weights (parts/sync=full)."
    elif sync.get("changed", "all") != "all":
        yield f"{at} keeps no earlier push, {sync.at}.changed = {sync.get('changed')} needs one. Remove one of them."
    for key in ("num_instances", "num_devices"):
        if (number := engine.get(key, 1)) > 1:
            yield f"{at} shares memory with one process, {engine.at}.{key} = {number}. Set it to 1, or remove ipc."


def _transport_fits(sync: Part, stage: Stage, run: ComposedRun) -> Messages:
    transport, folder = sync.get("transport"), sync.get("transfer_dir")
    if folder is not None and transport != "files":
        yield f"{sync.at}.transfer_dir does nothing with transport = {transport or 'ray'}. Set files, or remove it."
    if transport is None:
        return
    groups = groups_of_run(run)
    if stage.at in groups[0].holds:
        yield from _shares_memory(sync, stage) if transport == "ipc" else (_is_beside(sync, stage),)
        return
    num_nodes = cluster_shape(run.num_devices, run.file.cluster).num_nodes
    if transport == "ipc" and num_nodes > 1:
        yield f"{sync.at}.transport = ipc shares memory of one node, cluster.num_nodes = {num_nodes}. Set nccl or ray."
    shared = [both for one, other, both in shared_devices(groups) if stage.at in (*one.holds, *other.holds)]
    kind = kind_of(run.device)
    if transport == "nccl" and not kind.broadcasts:
        yield lacks(run.device, f"groups for {sync.at}.transport = nccl", "Set ray or files.")
    elif transport == "nccl" and kind.is_accelerator and shared:
        yield (
            f"{sync.at}.transport = nccl needs separate GPUs for each side, but devices {list(shared[0])} are shared. "
            f"Set ipc, or another {group_of(run, stage.at).given.at}."
        )


def group_of(run: ComposedRun, place: str) -> WorkerGroup:
    """The workers that hold TRAIN, REWARD or the engine of a stage (`Stage.at`)."""
    return next(group for group in groups_of_run(run) if place in group.holds)


def _named(stage: Stage) -> str:
    return "the engine" if stage.reads is None else f"the engine of {stage.at}"


RULES = (
    groups_need_ray,
    push_transport_fits_the_placement,
    engine_elsewhere_has_own_weights,
    sizes_are_read_where_they_are_chosen,
    async_reward_is_with_the_engine,
    pools_of_scorers_fit,
    one_worker_speaks_to_a_running_server,
    groups_that_overlap_take_turns,
    samples_divide_over_every_group,
    served_pools_hold_engines_alone,
)


def numbers(text: str, key: str, count: int, what: str, limit: str) -> tuple[int, ...]:
    """Numbers below `count`, in ascending order, from "all" or comma-separated numbers and ranges."""
    if text.strip() == "all":
        return tuple(range(count))
    found: set[int] = set()
    for part in (part.strip() for part in text.split(",")):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ConfigError(
                f"{key} = {text!r} names no {what}: {part!r} is no number and no range. Write 0-3, 4,5 or all."
            )
        found.update(range(first, last + 1))
    if max(found) >= count:
        raise ConfigError(
            f"{key} = {text} names {what} {max(found)}, but {limit} has {count} (0 to {count - 1}). "
            f"Lower it, or raise {limit}."
        )
    return tuple(sorted(found))
