"""A component of one runtime's workers, callable from the workers of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unirl.distributed.group.framework import ray_module
from unirl.distributed.group.waiting import CallFailed, answers
from unirl.distributed.tensor.transport import outgoing


@dataclass(frozen=True)
class RemoteRole:
    """Calls one component on every worker of another runtime. Pickles, unlike a `Role`.

    The runtime's own driver must not call the same workers meanwhile: they answer one call at a time, in order.
    """

    name: str
    actors: Sequence[Any]  # Any: ray actor handles
    workers: Sequence[str]
    """Names of the workers in errors."""
    timeout_s: float

    @classmethod
    def joined(cls, roles: Sequence[RemoteRole]) -> RemoteRole:
        """The components of several runtimes as those of one; at least one."""
        actors = tuple(actor for role in roles for actor in role.actors)
        return replace(roles[0], actors=actors, workers=tuple(worker for role in roles for worker in role.workers))

    def call(self, method: str, *args: Any) -> list[Any]:  # Any: as the component's methods
        """The method's results, one per worker. Arguments leave this process once.

        Raises a worker's error if it is a UniRLError, else WorkerError.
        """
        return self.submit(method, *args)()

    def submit(self, method: str, *args: Any) -> Callable[[], list[Any]]:  # Any: as the component's methods
        """Call the method without waiting; returns a function that waits as `call` does. Workers answer in order."""
        ray = ray_module()
        values = [outgoing(value) for value in args]
        references = values if len(self.actors) == 1 else [ray.put(value) for value in values]
        pending = {
            actor.call_component.remote(self.name, method, *references): worker
            for actor, worker in zip(self.actors, self.workers, strict=True)
        }

        def wait() -> list[Any]:
            try:
                actors = dict(zip(self.workers, self.actors, strict=True))
                return answers(pending, f"{self.name}.{method}", self.timeout_s, actors)
            except CallFailed as failed:
                failed.raise_cause()

        return wait
