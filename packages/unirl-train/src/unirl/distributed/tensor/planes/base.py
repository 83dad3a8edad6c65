"""What every data plane does, and the default one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from unirl.distributed.dispatch import HeldKey

PlaneName = Literal["ray", "rdt", "transfer_queue"]


class DataPlane(ABC):
    """Moves rows of held values between the workers of all groups of a run. Lives in the driver, which sees references
    alone; `RayWorker` has the other end. Any of Ray's types stands for handles and references.
    """

    actor_options: ClassVar[Mapping[str, Any]] = {}  # Any: options of ray.remote
    """What workers must be started with."""

    def prepare(self) -> None:  # noqa: B027 (Ray's objects need no more)
        """Ray has started, and a group of workers is about to."""

    def join(self, actors: Sequence[Any]) -> None:  # noqa: B027
        """Workers of a group have started."""

    def leave(self, actors: Sequence[Any]) -> None:  # noqa: B027
        """Workers of a group are about to stop."""

    @abstractmethod
    def pick(self, actor: Any, key: HeldKey, rows: Sequence[int]) -> tuple[Any | None, Any]:
        """Start to hand some rows over: a reference that is ready when they are there (None: nothing tells), and the
        one that `RayWorker.assemble` of the receiver is called with."""

    def taken(self) -> None:  # noqa: B027
        """What was picked has been assembled."""


class ObjectPlane(DataPlane):
    """Rows as bytes in Ray's object store: memory of the node, from which other nodes fetch."""

    def pick(self, actor: Any, key: HeldKey, rows: Sequence[int]) -> tuple[Any | None, Any]:
        done, picked = actor.pick.options(num_returns=2).remote(key, rows)
        return done, picked
