"""Members of a served pool in this process, which die where they are told to."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.pools.cutting import Ask
from unirl.distributed.pools.served import ServedPool
from unirl.distributed.pools.shelf import Store
from unirl.distributed.spans import Span
from unirl.distributed.worker import ComponentInfo, Worker, WorkerContext
from unirl.types.errors import WorkerError
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack


class Drawer:
    """An engine whose samples depend on their ids alone, and on the version that it was given."""

    def __init__(self) -> None:
        self.version, self.is_asleep, self.may_go = 0, False, threading.Event()

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None, begun: RolloutResp | None = None) -> RolloutResp:
        rewards = torch.tensor([float(name[1:]) + 100 * self.version for name in req.sample_ids])
        track = RolloutTrack(sample_ids=list(req.sample_ids), rewards=rewards)
        if begun is None:
            return RolloutResp(tracks={"image": track})
        assert begun.root_track().sample_ids == req.sample_ids
        grown = begun.root_track().fork("image", "redraw", 1)
        return RolloutResp(tracks={**begun.tracks, "redraw": grown.replace(rewards=rewards)})

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def plan(self) -> str:
        return "sigmas"

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        self.is_asleep = True

    @distributed(Dispatch.BROADCAST, Collect.FIRST, is_control=True)
    def abort(self) -> None:
        self.may_go.set()

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def wait(self) -> bool:
        return self.may_go.wait(60)

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def asleep(self) -> bool:
        return self.is_asleep


class LocalMember:
    """A worker of this process that dies where it is told to: at the asks in `deadly`, each once."""

    def __init__(self, number: int, deadly: set[str] | None = None) -> None:
        self.pid, self.number, self.deadly = number, number, deadly if deadly is not None else set()
        self.is_alive, self.death, self.num_asked, self.num_starts = True, "it was ended", 0, 1
        self.worker = self._made()

    @property
    def drawer(self) -> Any:
        return self.worker.component("engine")

    @property
    def name(self) -> str:
        return f"member {self.number}"

    def _made(self) -> Worker:
        return Worker(lambda context: {"engine": Drawer()}, WorkerContext(0, 1, "cpu"))

    def ready(self) -> Mapping[str, ComponentInfo]:
        return self.infos()

    def infos(self) -> Mapping[str, ComponentInfo]:
        return self.worker.component_infos()

    def take_busy_s(self) -> float:
        return float(self.number)

    def take_spans(self) -> list[Span]:
        return [Span(self.name, "engine.generate", 0, 1)]

    def remote_role(self, name: str) -> RemoteRole:
        return RemoteRole(name, (self,), (self.name,), 1.0)

    def call(self, message: Ask | str) -> Any:
        if not self.is_alive:
            raise WorkerError(self.name, "it is dead")
        if isinstance(message, str):
            return getattr(self.worker, message)()
        self.num_asked += 1
        for name in [name for value in message.args if isinstance(value, RolloutReq) for name in value.sample_ids]:
            if name in self.deadly:
                self.deadly.remove(name)
                self.die()
        result = self.worker.invoke(message.role, message.method, message.args, dict(message.kwargs), None)
        return (result.metadata_only(), result) if message.is_stored else result

    def die(self) -> None:
        self.is_alive = False
        raise WorkerError(self.name, "it died")

    def post(self, message: Ask) -> None:
        self.worker.invoke(message.role, message.method, message.args, dict(message.kwargs), None)

    def restart(self) -> None:
        self.worker, self.is_alive, self.num_starts = self._made(), True, self.num_starts + 1

    def stop(self) -> None:
        self.is_alive = False


class LocalStore(Store):
    """Values of this process."""

    def put(self, value: RolloutResp) -> RolloutResp:
        return value

    def get(self, stored: RolloutResp) -> RolloutResp:
        return stored

    def rows(self, stored: RolloutResp, rows: Sequence[int]) -> RolloutResp:
        return stored.select(rows)

    def joined(self, picked: Sequence[RolloutResp]) -> RolloutResp:
        return RolloutResp.concat(list(picked))


def pool_of(*members: LocalMember, rows: int | None = 4, start: int | None = None) -> ServedPool:
    """A pool that begins with the first `start` of these members, by default all; others join when it is resized."""
    size = len(members) if start is None else start
    return ServedPool("writers", members.__getitem__, size, LocalStore(), num_devices=len(members), rows_per_call=rows)


def request(num_groups: int, size: int = 2) -> RolloutReq:
    ids = [f"s{row}" for row in range(num_groups * size)]
    return RolloutReq(sample_ids=ids, group_ids=[f"g{row // size}" for row in range(len(ids))])
