"""Components that the runtime tests build in workers. A separate module, so that worker processes can import it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.distributed.worker import Builder, ComponentInfo, Worker, WorkerContext
from unirl.types.errors import ConfigError
from unirl.types.roles import Collect, Dispatch, MeshPlace, distributed
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import TextSegment


def numbered(ids: list[str], rewards: Tensor | None = None, advantages: Tensor | None = None) -> RolloutTrack:
    """Samples of these names, which a dispatch can cut."""
    return RolloutTrack(sample_ids=ids, rewards=rewards, advantages=advantages)


def grown(names: list[str], *, branch: int = 2, offset: float = 0.0) -> RolloutResp:
    """Root samples of these names with packed tokens, and `branch` children of each; every value is of its sample."""
    values = torch.arange(float(len(names))) + offset
    root = RolloutTrack(
        sample_ids=names,
        metadata=[{"of": name} for name in names],
        segment=TextSegment.pack(
            tokens=[torch.full((1 + row % 3,), int(value)) for row, value in enumerate(values.tolist())],
        ),
        rewards=values,
    )
    children = root.fork("text", "image", branch)
    return RolloutResp(tracks={"text": root, "image": children.replace(rewards=values.repeat_interleave(branch) + 0.5)})


def names(letter: str, count: int) -> list[str]:
    """Ids of some samples."""
    return [f"{letter}{row}" for row in range(count)]


class InProcess(Runtime):
    """Workers of this process, which never speak to each other."""

    def __init__(self, builder: Builder, num_workers: int) -> None:
        super().__init__()
        self.workers = [Worker(builder, WorkerContext(rank, num_workers, "cpu")) for rank in range(num_workers)]

    def _infos(self) -> Mapping[str, ComponentInfo]:
        return self.workers[0].component_infos()

    def _places(self) -> Sequence[MeshPlace]:
        return [worker.mesh_place for worker in self.workers]

    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        return [getattr(self.workers[rank], method)(*args) for rank, method, args in calls]

    def close(self) -> None:
        """Nothing to stop."""


class Unpicklable(Exception):
    """An error that cannot cross a process boundary."""

    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


class Source:
    """Makes and reports things, each by another dispatch mode."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.made: list[RolloutResp] = []
        self.num_zero_calls = 0

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def where(self, label: str = "") -> tuple[int, int, int, str]:
        """(rank, world size, process id, label)."""
        return self._context.rank, self._context.world_size, os.getpid(), label

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def environment(self, name: str) -> tuple[str | None, int]:
        """A variable of the worker's environment and its number of threads."""
        return os.environ.get(name), torch.get_num_threads()

    @distributed(Dispatch.BROADCAST)
    def first_rank(self) -> int:
        """The rank that answers a call collected by FIRST."""
        return self._context.rank

    @distributed(Dispatch.SCATTER, Collect.ALL)
    def given(self, item: object, *, named: object = None) -> tuple[int, object, object]:
        """(rank, what this rank was given)."""
        return self._context.rank, item, named

    @distributed(Dispatch.RANK_ZERO)
    def count_on_zero(self) -> int:
        """How often this was called here."""
        self.num_zero_calls += 1
        return self.num_zero_calls

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def zero_calls(self) -> int:
        """How often `count_on_zero` was called on each rank."""
        return self.num_zero_calls

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def make(self, asked: RolloutTrack, scale: float) -> RolloutResp:
        """One track; the reward of sample i is scale * its number, the latents stand for something heavy."""
        rewards = torch.tensor([scale * float(name) for name in asked.sample_ids])
        track = RolloutTrack(
            sample_ids=list(asked.sample_ids), rewards=rewards, component_rewards={"raw": rewards / scale}
        )
        self.made.append(RolloutResp(tracks={"image": track}))
        return self.made[-1]

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def keep(self, resp: RolloutResp) -> RolloutResp:
        """The share of this rank, held."""
        return resp

    @distributed(Dispatch.DP_SCATTER, Collect.CONCAT)
    def echo(self, resp: RolloutResp) -> RolloutResp:
        """The share of this rank, back."""
        return resp

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def weigh(self, track: RolloutTrack) -> tuple[list[float], int]:
        """The rewards of this rank and the elements of the storage that came with them."""
        values = track.rewards
        assert values is not None
        return values.tolist(), values.untyped_storage().nbytes() // values.element_size()

    @distributed(Dispatch.BROADCAST)
    def slice_of_something_large(self) -> Tensor:
        """Two elements of a million, with a history."""
        return torch.ones(1_000_000, requires_grad=True)[:2] * 1

    def private(self) -> None:
        """Not marked."""

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def sum_ranks(self) -> float:
        """A collective: the sum of rank + 1."""
        value = torch.tensor([float(self._context.rank + 1)])
        torch.distributed.all_reduce(value)
        return value.item()

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def wait_for(self, path: str) -> int:
        """Return the rank once there is such a file."""
        while not os.path.exists(path):
            time.sleep(0.02)
        return self._context.rank

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def refuse(self, rank: int, kind: str) -> int:
        """Raise on one rank."""
        if self._context.rank == rank:
            raise {"config": ConfigError("a is 1; set a=2"), "value": ValueError("odd"), "lock": Unpicklable()}[kind]
        return self._context.rank

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def die_in_collective(self, rank: int) -> float:
        """One rank is killed, the others wait for it in a collective."""
        if self._context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.sum_ranks()

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def start_child(self) -> int:
        """Start a process that outlives this one unless it is ended; returns its id."""
        return subprocess.Popen(["sleep", "600"]).pid


class PairedBackend:
    """Stands for a training backend whose ranks work in pairs on the same samples (sequence parallelism)."""

    def __init__(self, context: WorkerContext, *, neighbours: bool) -> None:
        rank, pairs = context.rank, context.world_size // 2
        dp_rank, sp_rank = divmod(rank, 2) if neighbours else (rank % pairs, rank // pairs)
        self.mesh_place = MeshPlace(dp_rank=dp_rank, dp_size=pairs, sp_rank=sp_rank, sp_size=2)


class Sink:
    """Receives what a `Source` on the same workers holds."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def is_same_object(self, resp: RolloutResp) -> bool:
        """True if the value arrived without a copy."""
        return resp is self._source.made[-1]

    @distributed(Dispatch.RANK_ZERO)
    def read_on_zero(self, resp: RolloutResp) -> int:
        """Number of samples that rank zero sees."""
        return resp.batch_size


class Trainee:
    """A tiny sharded network."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if torch.distributed.is_initialized():
            from torch.distributed.fsdp import fully_shard  # seconds of imports that the other fakes do without

            for layer in (self.network[0], self.network[2]):
                fully_shard(layer)
            fully_shard(self.network)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-2)

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def step(self, track: RolloutTrack) -> float:
        """One step from inputs (its advantages) to targets (its rewards) on this rank's share; FSDP averages the
        gradients. Returns the share's loss."""
        loss = (self.network(track.advantages).squeeze(1) - track.rewards).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @distributed(Dispatch.BROADCAST)
    def weights(self) -> dict[str, Tensor]:
        """All weights, whole."""
        state = self.network.state_dict()
        return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def build(context: WorkerContext) -> dict[str, object]:
    """The components of the runtime tests."""
    source = Source(context)
    return {"source": source, "sink": Sink(source), "trainee": Trainee()}


def build_source(context: WorkerContext) -> dict[str, object]:
    """One component that starts fast."""
    return {"source": Source(context)}


HANGS_S = 600.0


class Hanging(Source):
    """Has a method that does not return in the time of a test."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._told = threading.Event()

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def wait_until_told(self) -> bool:
        """True once `tell` was called meanwhile."""
        return self._told.wait(60)

    @distributed(Dispatch.BROADCAST, Collect.ALL, is_control=True)
    def tell(self) -> int:
        """End `wait_until_told`; returns the rank."""
        self._told.set()
        return self._context.rank

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def hang(self) -> None:
        time.sleep(HANGS_S)


def build_hanging(context: WorkerContext) -> dict[str, object]:
    """One component that can hang."""
    return {"source": Hanging(context)}


def build_pairs(context: WorkerContext, *, neighbours: bool = True) -> dict[str, object]:
    """A source in workers of which each two stand at one data-parallel place."""
    return {"backend": PairedBackend(context, neighbours=neighbours), "source": Source(context)}


def build_nothing(context: WorkerContext) -> dict[str, object]:
    """Fails as a recipe with a mistake does."""
    raise ConfigError(f"rank {context.rank} lacks a model; set model.path")


def check_pairs(runtime: Runtime, pairs: list[list[int]]) -> None:
    """Four workers at two places: each pair works on one half of the samples, and answers once."""
    assert (runtime.num_shards, runtime.num_workers) == (2, 4)
    source = runtime.role("source")
    assert [rank for rank, *_ in source.where()] == [own[0] for own in pairs]
    assert source.given(["a", "b"]) == [(pairs[0][0], "a", None), (pairs[1][0], "b", None)]
    assert source.first_rank() == 0
    resp = grown(names("a", 4))
    assert source.echo(resp).equals(resp)
    with source.keep(resp) as held:
        held.attach("text", advantages=torch.arange(4.0))
        whole = held.fetch()
        assert whole.equals(resp.with_values("text", advantages=torch.arange(4.0)))
        with runtime.gather([(held, [3, 0, 1, 2])]) as moved:
            assert moved.fetch().equals(whole.select([3, 0, 1, 2]))
            assert of_all_workers(runtime, moved, pairs) == [["a3", "a0"]] * 2 + [["a1", "a2"]] * 2
        assert of_all_workers(runtime, held, pairs) == [["a0", "a1"]] * 2 + [["a2", "a3"]] * 2
    assert runtime.num_held() == 0


def of_all_workers(runtime: Runtime, held: Held, pairs: list[list[int]]) -> list[list[str]]:
    """What each worker holds, collected or not: both of the first pair, then both of the second."""
    calls = [(rank, "map_held", (held.key, sample_ids, (), True)) for own in pairs for rank in own]
    return runtime._invoke_all(calls)


def sample_ids(resp: RolloutResp) -> list[str]:
    """Sample ids of the root track."""
    return resp.root_track().sample_ids
