"""Pools without devices on a Ray cluster: members are actors on the nodes of the pool, and one actor keeps them."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from unirl.distributed.group.framework import ray_module
from unirl.distributed.pools.hosting import HostedPool
from unirl.types.errors import ContractError, UniRLError, WorkerError
from unirl.types.heartbeat import BEAT_S, SILENT_S
from unirl.types.protocols.hosting import HostedMember

_LEAVE_TIMEOUT_S = 5.0
"""Time that a member gets to end what it started, before it is killed."""
_KEEPER_TIMEOUT_S = 900.0
"""Longest time of a call of the keeper, which may wait for a member to start."""


@dataclass(frozen=True)
class HostingPlan:
    """One pool: what its members host, and where."""

    name: str
    make: Callable[[], Any]  # Any: a hosted object
    """Runs in every member; must pickle."""
    num_members: int | None = None
    """None: one on each of its nodes."""
    nodes: Sequence[int] | None = None
    """Numbers of the run's nodes, which members take in turn; None: all nodes of the cluster."""
    num_cpus: float = 0.0
    """Cores that are reserved for each member."""


class RayHost:
    """The actor of a member. Asynchronous: it answers `beat` while calls run."""

    def __init__(self, make: Callable[[], Any], import_path: list[str]) -> None:  # Any: a hosted object
        sys.path.extend(entry for entry in import_path if entry not in sys.path)
        self._hosted = make()

    async def beat(self) -> tuple[int, str]:
        """A sign of life: its process id and node."""
        return os.getpid(), ray_module().get_runtime_context().get_node_id()

    async def call(self, method: str, args: tuple[Any, ...]) -> Any:  # Any: as the object's methods
        """What the future of a method of the object gives."""
        future: Future[Any] = getattr(self._hosted, method)(*args)
        return await asyncio.wrap_future(future)


@dataclass(frozen=True)
class RayHosted:
    """A member for those who ask it, in any process of the cluster. Implements HostedMember.

    silent_s: time without a sign of life after which a member that owes an answer is taken for dead.
    """

    key: str
    name: str
    actor: Any  # Any: a ray actor handle
    silent_s: float = SILENT_S

    def start(self, method: str, *args: Any) -> Callable[[], Any]:  # Any: as the object's methods
        return functools.partial(self._wait, self.actor.call.remote(method, args), method)

    def _wait(self, answer: Any, method: str) -> Any:  # Any: ray's reference, and as the object's methods
        ray = ray_module()
        heard, beat = time.monotonic(), None
        while not ray.wait([answer], timeout=min(BEAT_S, self.silent_s / 2))[0]:
            if beat is None:
                beat = self.actor.beat.remote()
            if ray.wait([beat], timeout=0.1)[0]:
                heard, beat = time.monotonic(), None
            elif time.monotonic() - heard > self.silent_s:
                raise WorkerError(self.name, f"{method}: no sign of life for {self.silent_s:.0f} s")
        return _got(answer, self.name)


def _got(answer: Any, name: str) -> Any:  # Any: ray's reference, and what it stands for
    """The value. Raises WorkerError if the process died, and the UniRLError that was raised there."""
    ray = ray_module()
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UniRLError):
            raise error.cause from None
        raise ContractError(f"{name} failed:\n{error}") from error
    except ray.exceptions.RayError as error:
        raise WorkerError(name, f"the process died. Ray says: {error}") from None


class RayHosting:
    """A process of a member. Implements Hosting."""

    def __init__(self, key: str, node: str, plan: HostingPlan, import_path: list[str]) -> None:
        ray = ray_module()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        actor = ray.remote(RayHost).options(
            num_cpus=plan.num_cpus, max_restarts=0, scheduling_strategy=strategy(node, soft=False)
        )
        self.member = RayHosted(key, key, actor.remote(plan.make, import_path))
        self._begun = self.member.actor.beat.remote()

    def is_ready(self, timeout_s: float) -> bool:
        if not ray_module().wait([self._begun], timeout=timeout_s)[0]:
            return False
        _got(self._begun, self.member.name)
        return True

    def stop(self, *, at_once: bool = False) -> None:
        ray = ray_module()
        if not at_once:
            ray.wait([self.member.actor.call.remote("close", ())], timeout=_LEAVE_TIMEOUT_S)
            # Ray prints a warning for an actor that is killed, but not for one that ends by itself.
            ray.wait([self.member.actor.__ray_terminate__.remote()], timeout=_LEAVE_TIMEOUT_S)
        ray.kill(self.member.actor, no_restart=True)
        if at_once and ray.wait([self._begun], timeout=0)[0]:
            _end_stopped(self._begun)


def _end_stopped(begun: Any) -> None:  # Any: ray's reference
    """Kill a process that cannot take Ray's word, where it stands on this node."""
    ray = ray_module()
    try:
        pid, node = ray.get(begun)
    except ray.exceptions.RayError:
        return
    if node == ray.get_runtime_context().get_node_id():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return


class Keeper:
    """The actor that keeps the members of a pool, asked by the driver and by all who use it."""

    def __init__(self, plan: HostingPlan, nodes: Sequence[str], start_timeout_s: float, import_path: list[str]) -> None:
        sys.path.extend(entry for entry in import_path if entry not in sys.path)
        self._nodes = list(nodes)

        def make(number: int, key: str) -> RayHosting:
            return RayHosting(key, self._node(number), plan, import_path)

        self._pool = HostedPool(plan.name, make, plan.num_members or len(nodes), start_timeout_s=start_timeout_s)

    def perform(self, method: str, *args: Any) -> Any:  # Any: as the pool's methods
        """Call a method of the pool."""
        return getattr(self._pool, method)(*args)

    def _node(self, number: int) -> str:
        """The node of a member: of those of the pool that live, else any that lives."""
        alive = [node["NodeID"] for node in ray_module().nodes() if node["Alive"]]
        own = [node for node in self._nodes if node in alive] or alive
        return own[number % len(own)]


@dataclass(frozen=True)
class RayHostedPool:
    """The pool for the driver and for all who use it; pickles. Implements HostingPool."""

    name: str
    keeper: Any  # Any: a ray actor handle

    @classmethod
    def started(cls, plan: HostingPlan, nodes: Sequence[str], start_timeout_s: float) -> RayHostedPool:
        """Start the members. nodes: Ray's ids of all nodes of the run, in order. Raises what starting them raises."""
        ray = ray_module()
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        own = alive if plan.nodes is None else [nodes[number] for number in plan.nodes]
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        keeper = ray.remote(Keeper).options(num_cpus=0, max_concurrency=16, scheduling_strategy=here)
        pool = cls(plan.name, keeper.remote(plan, own, start_timeout_s, sys.path))
        try:
            pool._ask("require_ready")
        except UniRLError:
            pool.close()
            raise
        return pool

    def members(self) -> Sequence[HostedMember]:
        return self._ask("members")

    def lost(self, member: HostedMember, why: str) -> None:
        self._ask("lost", member, why)

    def resize(self, size: int) -> None:
        self._ask("resize", size)

    def gauges(self) -> dict[str, float]:
        return self._ask("gauges")

    def close(self) -> None:
        """End the members and their keeper. Safe to call twice."""
        ray = ray_module()
        if ray.is_initialized():
            ray.wait([self.keeper.perform.remote("close")], timeout=2 * _LEAVE_TIMEOUT_S)
            ray.kill(self.keeper, no_restart=True)

    def _ask(self, method: str, *args: Any) -> Any:  # Any: as the pool's methods
        answer = self.keeper.perform.remote(method, *args)
        if not ray_module().wait([answer], timeout=_KEEPER_TIMEOUT_S)[0]:
            raise WorkerError(f"keeper of the pool {self.name}", f"{method}: no answer in {_KEEPER_TIMEOUT_S:.0f} s")
        return _got(answer, f"keeper of the pool {self.name}")
