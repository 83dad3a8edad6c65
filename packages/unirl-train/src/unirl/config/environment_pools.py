"""Pools of kind env: which environment each one plays, on which nodes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unirl.config.placement import ENV, ClusterShape, cluster_shape, numbers
from unirl.config.runs import ComposedRun
from unirl.config.schema import Pool, built
from unirl.types.recipe import Messages, Part

OF_ENVIRONMENTS = ("nodes", "processes", "cpus")
"""Keys of pools of kind env alone."""
OF_DEVICES = ("devices", "served", "samples_per_call")
"""Keys of other pools alone."""
_COUNTS: Mapping[str, str] = {"turns": "num_workers", "environment": "num_processes"}
"""What plays -> its key for processes next to the engine."""


@dataclass(frozen=True)
class EnvironmentPool:
    """A pool of kind env."""

    name: str
    num_processes: int
    """For each member."""
    num_members: int | None
    """None: one on each node."""
    nodes: tuple[int, ...] | None
    """Numbers of the run's; None: all of the cluster."""
    num_cpus: float


@dataclass(frozen=True)
class Player:
    """A part of a recipe whose environment a pool may play: turns, or the environment of an engine."""

    part: Part
    count: str
    """Its key for processes next to the engine."""

    @property
    def pool(self) -> str | None:
        """Name of its pool; None: the processes are next to the engine."""
        return self.part.node.get("pool")


def players(run: ComposedRun) -> Iterator[Player]:
    """All that play episodes."""
    for stage in run.stages:
        if stage.turns is not None:
            yield Player(stage.turns, _COUNTS["turns"])
        environment = stage.engine.inner.get("environment")
        if environment is not None:
            yield Player(environment, _COUNTS["environment"])


def environment_pools(run: ComposedRun) -> list[EnvironmentPool]:
    """The pools of kind env of a recipe. Raises ConfigError for nodes that the run does not have."""
    shape = cluster_shape(run.num_devices, run.file.cluster)
    pools = {str(name): built(Pool, pool) for name, pool in run.file.pools.items() if pool.get("kind") == ENV}
    return [
        EnvironmentPool(name, pool.processes, pool.members, _nodes(name, pool, shape), pool.cpus)
        for name, pool in pools.items()
    ]


def _nodes(name: str, pool: Pool, shape: ClusterShape) -> tuple[int, ...] | None:
    if pool.nodes is None:
        return None
    if pool.nodes in shape.node_groups:
        return shape.node_groups[str(pool.nodes)]
    return numbers(str(pool.nodes), f"pools.{name}.nodes", shape.num_nodes, "node", "cluster.num_nodes")


# Rules ---------------------------------------------------------------------------------------------------------------


def environment_pools_play_one_environment(run: ComposedRun) -> Messages:
    """Each pool of kind env is named by what plays in it, and only by that."""
    pools = {pool.name: pool for pool in environment_pools(run)}
    users: dict[str, list[str]] = {name: [] for name in pools}
    for player in players(run):
        at, name = f"{player.part.at}.pool", player.pool
        if name is None:
            continue
        if name not in pools:
            known = ", ".join(pools) or "none"
            yield f"{at} = {name}: there is no such pool of kind env; there are {known}. Add pools.{name}.kind: env."
            continue
        users[name].append(at)
        given = player.part.node.get(player.count)
        if given is not None:
            yield (
                f"{player.part.at}.{player.count} = {given} are processes next to the engine, and {at} = {name} plays "
                f"in a pool. Set pools.{name}.processes, and remove one of the others."
            )
    for name, places in users.items():
        if not places:
            yield (
                f"pools.{name}: no environment plays in it. Name it in turns.pool or engine.environment.pool, or "
                "remove it."
            )
        elif len(places) > 1:
            yield f"{' and '.join(places)} name the pool {name}, which plays one environment. Give each its own."


def environment_pools_need_ray_for_nodes(run: ComposedRun) -> Messages:
    """A local run has one machine, whose cores nothing reserves."""
    for pool in environment_pools(run):
        for key, value in {"nodes": pool.nodes, "cpus": pool.num_cpus or None}.items():
            if run.runtime == "local" and value is not None:
                yield f"pools.{pool.name}.{key} does nothing with runtime: local. Set runtime: ray, or remove it."


RULES = (environment_pools_play_one_environment, environment_pools_need_ray_for_nodes)
