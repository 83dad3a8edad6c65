"""Interface of data planes, and the default one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from unirl.distributed.dispatch import HeldKey

PlaneName = Literal["ray", "rdt", "transfer_queue"]


class DataPlane(ABC):
    """Moves rows of held values between the workers of all groups of a run. Lives in the driver, which only sees
    references; `RayWorker` has the other end. `Any` stands for Ray's handles and references.
    """

    actor_options: ClassVar[Mapping[str, Any]] = {}  # Any: options of ray.remote
    """Options with which workers must be started."""

    def prepare(self) -> None:  # noqa: B027 (Ray's objects need no more)
        """Called when Ray has started and a group of workers is about to start."""

    def join(self, actors: Sequence[Any]) -> None:  # noqa: B027
        """Called when the workers of a group have started."""

    def leave(self, actors: Sequence[Any]) -> None:  # noqa: B027
        """Called when the workers of a group are about to stop."""

    @abstractmethod
    def pick(self, actor: Any, key: HeldKey, rows: Sequence[int]) -> tuple[Any | None, Any]:
        """Start sending some rows. Returns a reference that is ready when the rows are (or None if that is not known),
        and the reference that the receiver's `RayWorker.assemble` takes."""

    def taken(self) -> None:  # noqa: B027
        """Called when all picked rows have been assembled."""


class ObjectPlane(DataPlane):
    """Rows as bytes in Ray's object store, in the node's memory; other nodes fetch them from there."""

    def pick(self, actor: Any, key: HeldKey, rows: Sequence[int]) -> tuple[Any | None, Any]:
        done, picked = actor.pick.options(num_returns=2).remote(key, rows)
        return done, picked
