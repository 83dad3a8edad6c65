"""Which devices each worker group of a run has: the grammar of `placement`, and the shape of the cluster.

Devices are counted through all nodes, from 0: with two nodes of four, node 1 has devices 4 to 7. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from unirl.config.runs import ComposedRun
from unirl.config.schema import Cluster, Placement
from unirl.types.errors import ConfigError
from unirl.types.recipe import Messages, Part

DEVICES_PER_NODE = 8
"""Where neither the nodes nor their devices are counted, a run of more devices than this fills nodes of as many."""

EVERYTHING = ("train", "rollout", "reward")
"""What can be placed."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class ClusterShape:
    """The nodes of a run, each with as many devices."""

    num_nodes: int
    devices_per_node: int
    node_groups: Mapping[str, tuple[int, ...]]
    """Name -> its nodes."""

    @property
    def num_devices(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True)
class WorkerGroup:
    """Workers that hold the same components, one on each of some devices."""

    name: str
    holds: tuple[str, ...]
    """What of "train", "rollout" and "reward" they hold."""
    devices: tuple[int, ...]


def cluster_shape(num_devices: int, cluster: Cluster) -> ClusterShape:
    """The nodes that `num_devices` devices fill. Raises ConfigError where they do not fill them evenly, and for a node
    group that names no node or one that is not there."""
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
        groups[str(name)] = _numbers(str(text), key, num_nodes, "node", "cluster.num_nodes")
    return ClusterShape(num_nodes, per_node, groups)


def devices_of(text: str | int, key: str, shape: ClusterShape) -> tuple[int, ...]:
    """The devices that a placement names, in rising order: "0-3", "4,5", "all", or of some nodes "big:0-7", "big:all".

    Raises ConfigError, naming `key`, for what is no such thing, devices that are not there and unknown node groups.
    """
    group, separator, rest = str(text).rpartition(":")
    if not separator:
        return _numbers(rest, key, shape.num_devices, "device", "num_devices")
    if group not in shape.node_groups:
        known = ", ".join(shape.node_groups) or "it names none"
        raise ConfigError(
            f"{key} = {text}: there is no node group {group!r} in cluster.node_groups ({known}). Add it there."
        )
    size = shape.devices_per_node
    devices = [node * size + device for node in shape.node_groups[group] for device in range(size)]
    chosen = _numbers(rest, key, len(devices), f"device of {group}", f"cluster.node_groups.{group}")
    return tuple(devices[number] for number in chosen)


def worker_groups(num_devices: int, cluster: Cluster, placement: Placement) -> list[WorkerGroup]:
    """The worker groups of a run, `train` first. Groups that are given the same devices share their workers.

    Without a placement one group holds everything. Where `rollout` is not placed the engine is with what trains;
    where `reward` is not placed it is with the engine, so that samples are scored where they lie.
    Raises ConfigError as `cluster_shape` and `devices_of` do, and where something is placed but `train` is not.
    """
    shape = cluster_shape(num_devices, cluster)
    placed = {item.name: getattr(placement, item.name) for item in fields(placement)}
    placed = {name: text for name, text in placed.items() if text is not None}
    if not placed:
        return [WorkerGroup("worker", EVERYTHING, tuple(range(num_devices)))]
    if "train" not in placed:
        raise ConfigError(f"placement.{next(iter(placed))} is given, placement.train is not. Name its devices too.")
    devices = {name: devices_of(text, f"placement.{name}", shape) for name, text in placed.items()}
    devices.setdefault("rollout", devices["train"])
    devices.setdefault("reward", devices["rollout"])
    holders: dict[tuple[int, ...], list[str]] = {}
    for name in EVERYTHING:
        holders.setdefault(devices[name], []).append(name)
    return [WorkerGroup(names[0], tuple(names), own) for own, names in holders.items()]


def groups_of_run(run: ComposedRun) -> list[WorkerGroup]:
    """The worker groups of a recipe. Raises as `worker_groups` does."""
    return worker_groups(run.num_devices, run.file.cluster, run.file.placement)


def shared_devices(groups: Sequence[WorkerGroup]) -> Iterator[tuple[WorkerGroup, WorkerGroup, tuple[int, ...]]]:
    """Pairs of groups with the devices that both have: they take turns there."""
    for place, group in enumerate(groups):
        for other in groups[place + 1 :]:
            both = tuple(device for device in group.devices if device in other.devices)
            if both:
                yield group, other, both


# Rules ---------------------------------------------------------------------------------------------------------------


def groups_need_ray(run: ComposedRun) -> Messages:
    """Workers of several groups are processes."""
    if run.runtime != "ray" and len(groups_of_run(run)) > 1:
        yield (
            f"placement.train = {run.file.placement.train}: groups of workers need runtime: ray; runtime is "
            f"{run.runtime}. Change one of them."
        )


def engine_elsewhere_has_own_weights(run: ComposedRun) -> Messages:
    """An engine that samples with the weights that train is where they are."""
    if _share(run, "train", "rollout"):
        return
    if run.is_staged:
        yield (
            f"placement.rollout = {run.file.placement.rollout}, but the engines of stages stand beside what trains. "
            "Remove placement.rollout."
        )
    elif not run.engine.ability("has_own_weights"):
        yield (
            f"placement.rollout = {run.file.placement.rollout} gives the engine workers of its own, but "
            f"{run.engine.name} samples with the very weights that train. Take an engine that is pushed to "
            "(parts/engine=replica), or remove placement.rollout."
        )


def async_reward_is_with_the_engine(run: ComposedRun) -> Messages:
    """Samples are handed over as they are made within a worker."""
    if run.reward.get("is_async") and not _share(run, "rollout", "reward"):
        yield (
            f"reward.is_async hands samples over within a worker, but placement.reward = {run.file.placement.reward} "
            "is not where the engine is. Set reward.is_async: false, or remove placement.reward."
        )


def one_worker_speaks_to_a_running_server(run: ComposedRun) -> Messages:
    """A server that runs already has one worker that pushes to it."""
    for engine in (stage.engine for stage in run.stages):
        url = engine.get("url")
        for group in groups_of_run(run):
            if url is not None and "rollout" in group.holds and len(group.devices) > 1:
                yield (
                    f"{engine.at}.url = {url} is one server, to which each of {len(group.devices)} workers would push. "
                    "Give the engine one worker, which asks for all samples: name what trains in placement.train, and "
                    f"set placement.rollout={group.devices[0]}; or remove {engine.at}.url."
                )


def groups_that_overlap_take_turns(run: ComposedRun) -> Messages:
    """On a GPU that an engine shares with what trains, the engine gives the memory back; a server that runs already has
    devices of its own."""
    is_elsewhere = run.engine.get("url") is not None
    if run.device != "cuda" or is_elsewhere or (run.engine.ability("can_sleep") and run.file.residency.sleep_engine):
        return
    for one, other, both in shared_devices(groups_of_run(run)):
        if "rollout" not in (*one.holds, *other.holds):
            continue
        clash = f"placement.{one.name} and placement.{other.name} both have devices {list(both)}"
        if run.engine.ability("can_sleep"):
            yield f"{clash}, where they take turns. Set residency.sleep_engine: true, or give each devices of its own."
        else:
            yield (
                f"{clash}, but {run.engine.name} cannot give their memory back (can_sleep). Give each group devices of "
                "its own."
            )


def samples_divide_over_every_group(run: ComposedRun) -> Messages:
    """Every group cuts a batch evenly; of the one that trains, `unirl.trainer.rules` asks more."""
    prompts, repeats = run.batch_size, run.samples_per_prompt
    product = f"batch_size * {run.samples_key} = {prompts} * {repeats} = {prompts * repeats}"
    for group in groups_of_run(run)[1:]:
        if (prompts * repeats) % len(group.devices):
            yield (
                f"{product} samples do not divide over the {len(group.devices)} devices of placement.{group.name} = "
                f"{getattr(run.file.placement, group.name)}. Change one of them."
            )


def push_transport_fits_the_placement(run: ComposedRun) -> Messages:
    """A transport crosses to workers that are elsewhere, and has what it needs there."""
    for stage in run.stages:
        sync = run.all_policies[stage.policy].sync
        if sync is not None and stage.engine.ability("has_own_weights"):
            yield from _transport_fits(sync, stage.engine, run)


def _transport_fits(sync: Part, engine: Part, run: ComposedRun) -> Messages:
    transport, folder = sync.get("transport"), sync.get("transfer_dir")
    if folder is not None and transport != "files":
        yield f"{sync.at}.transfer_dir does nothing with transport = {transport or 'ray'}. Set files, or remove it."
    if transport is None:
        return
    if _share(run, "train", "rollout"):
        yield (
            f"{sync.at}.transport = {transport} does nothing: {engine.name} is with what trains. Remove it, or "
            "give the engine workers of its own (placement.train, placement.rollout)."
        )
        return
    num_nodes = cluster_shape(run.num_devices, run.file.cluster).num_nodes
    if transport == "ipc" and num_nodes > 1:
        yield f"{sync.at}.transport = ipc shares memory of one node, cluster.num_nodes = {num_nodes}. Set nccl or ray."
    shared = [
        both for one, other, both in shared_devices(groups_of_run(run)) if "rollout" in (*one.holds, *other.holds)
    ]
    if transport == "nccl" and run.device == "cuda" and shared:
        yield (
            f"{sync.at}.transport = nccl needs GPUs of its own for each side, but devices {list(shared[0])} are "
            "shared. Set ipc, or another placement.rollout."
        )


def _share(run: ComposedRun, one: str, other: str) -> bool:
    """Whether two things that can be placed are with the same workers."""
    return any(one in group.holds and other in group.holds for group in groups_of_run(run))


RULES = (
    groups_need_ray,
    push_transport_fits_the_placement,
    engine_elsewhere_has_own_weights,
    async_reward_is_with_the_engine,
    one_worker_speaks_to_a_running_server,
    groups_that_overlap_take_turns,
    samples_divide_over_every_group,
)


def _numbers(text: str, key: str, count: int, what: str, limit: str) -> tuple[int, ...]:
    """Numbers below `count`, in rising order, of "all" or ranges and single ones between commas."""
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
