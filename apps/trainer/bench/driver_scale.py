"""What the driver does at 64, 256 and 1,024 GPUs, by the real code on virtual time.

    uv run python apps/trainer/bench/driver_scale.py [--gpus 64 256 1024] [--rollouts 12] [--requests 2]
        [--window 0.3] [--at-once 1] [--generate-s 200]
        [--retract] [--lend] [--threads] [--profile 1024]

The real data source, collector, slots, asynchronous loop, learner, served pool and groups of workers. Half of the GPUs
are members of a served pool of engines, a quarter score, a quarter train; each is an object of this process that takes
a drawn time: log-normal, 100 s on average for a call of an engine (one prompt, 8 samples), 80 s for a worker's share of
a request's rewards, 300 s for training. A rollout has four prompts for each engine, in two requests, and is trained on
with weights at most two versions newer. Time is virtual (`virtual_time`): hours pass in the seconds that the driver
computes.

Driver CPU seconds are those of the process without those in which a worker stood for another process. What crosses
between driver and worker is pickled on one side and read on the other, as a process would; what Ray adds to each call
is not included. `--retract` has pushes cut calls short (`schedule.on_push`). `--lend` has engines on the GPUs that
train, too, which generate while training waits (`schedule.kind: hybrid`): to wake them and to put them to sleep takes
10 s each. `--threads` runs the same with ordinary threads and no waiting, to compare CPU seconds; `--profile N` lists
functions by the time that they take at N GPUs.
"""

# ruff: noqa: INP001, T201, S301 - a script, no package; pickles of this process
from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import itertools
import json
import logging
import math
import pickle
import pstats
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from idle_roles import IdleStack, NoCheckpoints
from virtual_time import VirtualThreads

from unirl.algorithms.advantages import AdvantageConfig
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.dispatch import HeldKey
from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.groups import WorkerGroups
from unirl.distributed.held import Held
from unirl.distributed.pools.cutting import Ask
from unirl.distributed.pools.lent import LentMembers
from unirl.distributed.pools.served import ServedPool
from unirl.distributed.pools.shelf import Shelf, Store
from unirl.distributed.runtime import Runtime
from unirl.distributed.spans import Span
from unirl.distributed.tensor.transport import outgoing
from unirl.distributed.worker import Builder, ComponentInfo, Openable, Worker, WorkerContext
from unirl.train.stack import TrainStepResult
from unirl.trainer.build.assembly import assemble
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.loops.asynchronous import AsyncTrainer
from unirl.trainer.loops.hybrid import Handover, HybridTrainer, Lending
from unirl.trainer.loops.order import REQUESTS, OrderLog
from unirl.trainer.settings import TrainerSettings
from unirl.trainer.text import TextModality
from unirl.types.conditions import PromptCondition
from unirl.types.copies import Copies
from unirl.types.errors import ContractError
from unirl.types.roles import Collect, Dispatch, MeshPlace, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

REPEATS = 8
PROMPTS_PER_ENGINE, REQUESTS_PER_ROLLOUT, MAX_STALENESS = 4, 2, 2
PUSH_S = 10.0
WARMUP = 3
"""Rollouts before the engine is as far ahead as it may be. They are not in the figures, nor are the last ones, before
which the engine has no more to do."""


@dataclass(frozen=True)
class Latency:
    """Log-normal seconds of a call."""

    mean_s: float
    spread: float
    """Sigma of the logarithm."""

    def drawn(self, draw: random.Random) -> float:
        """One."""
        return self.mean_s * draw.lognormvariate(-(self.spread**2) / 2, self.spread)


REWARD_S = 80.0
"""Mean of a worker's share of a request's rewards, where a rollout has `REQUESTS_PER_ROLLOUT`."""
LATENCIES = {"generate": Latency(100.0, 0.5), "score_track": Latency(REWARD_S, 0.25), "train": Latency(300.0, 0.1)}


@dataclass
class Wire:
    """What passes between the driver and its workers. A worker's CPU seconds are kept apart from the driver's.

    sleep: waits for the workers. wait: the same, but no longer than until an event. seen: called with each value that
    the driver sends or gets. aside: entered while a worker computes.
    """

    sleep: Callable[[float], None] = lambda seconds: None
    wait: Callable[[threading.Event, float], object] = lambda event, seconds: None
    seen: Callable[[Any], None] = lambda value: None
    aside: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    calls_by_method: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    workers_cpu_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    """Seconds of all workers together by method."""
    num_in_flight: int = 0
    most_in_flight: int = 0

    def ask(
        self,
        what: str,
        message: Any,
        answer: Callable[[Any], Any],
        takes_s: float | None = None,
        ends: threading.Event | None = None,
    ) -> Any:
        """The answer of one worker. takes_s: how long; None: no time, or the caller waits. ends: ends it early."""
        self.seen(message)
        sent = pickle.dumps(message, protocol=5)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        if takes_s is not None:
            begun_s = time.monotonic()
            if ends is None:
                self.sleep(takes_s)
            else:
                self.wait(ends, takes_s)
            took_s = takes_s if ends is None or not ends.is_set() else time.monotonic() - begun_s
            self.busy_s[what] = self.busy_s.get(what, 0.0) + took_s
        with self.aside():
            begun = time.thread_time()
            got = pickle.dumps(outgoing(answer(pickle.loads(sent))), protocol=5)
            self.workers_cpu_s += time.thread_time() - begun
        self.num_in_flight -= 1
        self.calls_by_method[what] += 1
        self.num_bytes += len(sent) + len(got)
        found = pickle.loads(got)
        self.seen(found)
        return found


# The object store -----------------------------------------------------------------------------------------------------

OBJECTS: dict[int, RolloutResp] = {}
_NUMBERS = itertools.count()


class Reference:
    """An object of the store, which is forgotten with it."""

    def __init__(self, value: RolloutResp) -> None:
        self.number = next(_NUMBERS)
        OBJECTS[self.number] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return (SentReference, (self.number,))

    def __del__(self) -> None:
        OBJECTS.pop(self.number, None)


@dataclass(frozen=True)
class SentReference:
    """A reference as a worker gets it."""

    number: int


@dataclass(frozen=True)
class Rows:
    """Some samples of objects. Implements Openable."""

    pieces: tuple[tuple[Any, tuple[int, ...]], ...]

    def opened(self, kept: dict[str, Any]) -> RolloutResp:
        """The samples."""
        return RolloutResp.concat([OBJECTS[reference.number].select(rows) for reference, rows in self.pieces])


class Objects(Store):
    """References to OBJECTS."""

    def put(self, value: RolloutResp) -> Reference:
        return Reference(value)

    def get(self, stored: Any) -> RolloutResp:
        return stored.opened({}) if isinstance(stored, Rows) else OBJECTS[stored.number]

    def rows(self, stored: Any, rows: Sequence[int]) -> Rows:
        if not isinstance(stored, Rows):
            return Rows(((stored, tuple(rows)),))
        ((reference, own),) = stored.pieces
        return Rows(((reference, tuple(own[row] for row in rows)),))

    def joined(self, picked: Sequence[Any]) -> Rows:
        whole = [
            each if isinstance(each, Rows) else self.rows(each, range(self.get(each).batch_size)) for each in picked
        ]
        return Rows(tuple(piece for each in whole for piece in each.pieces))


# Workers --------------------------------------------------------------------------------------------------------------


class Engine:
    """Makes samples of a few tokens."""

    def __init__(self) -> None:
        self.version = 0

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """All are welcome."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load(self, version: int) -> None:
        """Take new weights."""
        self.version = version

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None, begun: RolloutResp | None = None) -> RolloutResp:
        """One per row."""
        lengths = [1 + hash(name) % 7 for name in req.sample_ids]
        track = req.make_root_track(
            conditions={"prompt": PromptCondition.pack(tokens=[torch.zeros(2, dtype=torch.long)] * req.batch_size)},
            segment=TextSegment.pack(tokens=[torch.zeros(length, dtype=torch.long) for length in lengths]),
            decoded=None,
        )
        versions = torch.full((req.batch_size,), self.version)
        counts = {"tokens": torch.tensor(lengths, dtype=torch.float32)}
        return RolloutResp(tracks={"text": track.replace(policy_versions=versions, counts=counts)})

    @distributed(Dispatch.BROADCAST, Collect.FIRST, is_control=True)
    def abort(self) -> None:
        """End calls; see `Member.post`."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        """Give memory back."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wake_up(self) -> None:
        """Take it again."""


LEFT_S: dict[str, float] = {}
"""First sample of a call that was cut short -> seconds that it still takes."""


class Reward:
    """Scores by the id."""

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def score_track(self, resp: RolloutResp, track: str, *, is_training: bool = True) -> dict[str, float]:
        """A number per sample."""
        own = resp.tracks[track]
        rewards = torch.tensor([float(hash(name) % 100) for name in own.sample_ids])
        resp.tracks[track] = own.replace(rewards=rewards, reward_errors=[None] * own.batch_size)
        return {}


class Stack(IdleStack):
    """Trains nothing."""

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def samples_per_unit(self) -> int:
        """Each alone."""
        return 1

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def train(self, resp: RolloutResp, *, progress: float) -> TrainStepResult:
        """Take the time."""
        return TrainStepResult({})


class Member:
    """A worker of the served pool. Implements WorkerMember."""

    is_alive, death = True, ""

    def __init__(self, number: int, wire: Wire) -> None:
        self.pid, self.name = number, f"engine {number}"
        self._wire, self._draw = wire, random.Random(number)  # noqa: S311 - a simulation
        self._running: set[threading.Event] = set()
        """What ends the calls that run."""
        self._worker = Worker(lambda context: {"engine": Engine()}, WorkerContext(0, 1, "cpu"))

    def ready(self) -> Mapping[str, ComponentInfo]:
        return self.infos()

    def infos(self) -> Mapping[str, ComponentInfo]:
        return self._worker.component_infos()

    def take_busy_s(self) -> float:
        return 0.0

    def take_spans(self) -> list[Span]:
        return []

    def remote_role(self, name: str) -> RemoteRole:
        raise ContractError("the pushes of this simulation go through the pool")

    def call(self, message: Ask | str) -> Any:
        if isinstance(message, str):
            return self._wire.ask(message, message, lambda method: getattr(self._worker, method)())
        if message.method != "generate":
            return self._answered(message, PUSH_S)
        first, begun_s = message.args[0].sample_ids[0], time.monotonic()
        takes_s = LEFT_S.pop(first, None) or LATENCIES["generate"].drawn(self._draw)
        self._running.add(ends := threading.Event())
        found = self._answered(message, takes_s, ends)
        self._running.remove(ends)
        if ends.is_set():
            LEFT_S[first] = takes_s - (time.monotonic() - begun_s)
        return found

    def _answered(self, message: Ask, takes_s: float, ends: threading.Event | None = None) -> Any:
        made: list[RolloutResp] = []

        def answer(ask: Ask) -> Any:
            result = self._worker.invoke(ask.role, ask.method, ask.args, dict(ask.kwargs), None)
            if not ask.is_stored:
                return result
            if ends is not None and ends.is_set():
                track = result.tracks["text"]
                result.tracks["text"] = track.replace(is_unfinished=torch.ones(track.batch_size, dtype=torch.bool))
            made.append(result)
            return result.metadata_only()

        found = self._wire.ask(message.method, message, answer, takes_s, ends)
        return (found, Reference(made[0])) if message.is_stored else found

    def post(self, message: Ask) -> None:
        if message.method != "abort":
            raise ContractError(f"this simulation posts no {message.method}")
        for ends in tuple(self._running):
            ends.set()

    def restart(self) -> None:
        raise ContractError("no member of this simulation dies")

    def stop(self) -> None:
        """Nothing to stop."""


class Fleet(Runtime):
    """An even group of workers, one per device, which take as long as the slowest."""

    def __init__(self, builder: Builder, num_workers: int, wire: Wire) -> None:
        super().__init__()
        self._wire, self._draw = wire, random.Random(num_workers)  # noqa: S311 - a simulation
        self._workers = [Worker(builder, WorkerContext(rank, num_workers, "cpu")) for rank in range(num_workers)]
        self._shelf = Shelf(Objects())

    def _infos(self) -> Mapping[str, ComponentInfo]:
        return self._workers[0].component_infos()

    def _places(self) -> Sequence[MeshPlace]:
        size = len(self._workers)
        return [MeshPlace(dp_rank=rank, dp_size=size) for rank in range(size)]

    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        if latency := LATENCIES.get(calls[0][2][1]) if calls[0][1] == "invoke" else None:
            name = calls[0][2][1]
            # Ranks that train wait for each other in every collective, so that they take equally long.
            common_s = latency.drawn(self._draw)
            taken = [common_s if name == "train" else latency.drawn(self._draw) for _ in calls]
            self._wire.busy_s[name] = self._wire.busy_s.get(name, 0.0) + sum(taken)
            self._wire.sleep(max(taken))
        return [self._ask(rank, method, args) for rank, method, args in calls]

    def _ask(self, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        def answer(own: tuple[Any, ...]) -> Any:
            return getattr(self._workers[rank], method)(*own)

        return self._wire.ask(method, outgoing(args), answer)

    def _pick(self, calls: list[tuple[int, HeldKey, tuple[int, ...]]]) -> list[Any]:
        found: list[Any] = []
        for rank, key, rows in calls:
            kept: list[RolloutResp] = []
            worker = self._workers[rank]
            self._wire.ask("pick", (key, rows), lambda args, own=kept, worker=worker: own.append(worker.pick(*args)))
            found.append(Rows(((Reference(kept[0]), tuple(range(len(rows)))),)))
        return found

    def _assemble(self, calls: list[tuple[int, tuple[Any, ...], list[Any]]]) -> list[RolloutResp]:
        def assembled(worker: Worker, args: Any) -> RolloutResp:
            own, arrived = args
            opened = [value.opened({}) if isinstance(value, Openable) else value for value in arrived]
            return worker.assemble(*own, opened)

        return [
            self._wire.ask("assemble", (args, arrived), functools.partial(assembled, self._workers[rank]))
            for rank, args, arrived in calls
        ]

    def landed(self, held: Held) -> Held:
        return self._shelf.landing(held)

    def close(self) -> None:
        self._is_closed = True


class Sync:
    """Has every engine load the present version."""

    def __init__(self, pool: ServedPool) -> None:
        self._pool = pool
        self._version = 0

    def prepare(self) -> None:
        """Nothing to wait for."""

    def push(self, policy: Copies = None) -> dict[str, float]:
        """Count on, and tell all."""
        self._pool.ask([member.pid for member in self._pool.working], Ask("engine", "load", (self._version,)))
        self._version += 1
        return {}


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Workers of a cluster, engines : reward : train = 2 : 1 : 1, and what they are given."""

    num_gpus: int

    @property
    def num_engines(self) -> int:
        """Members of the served pool."""
        return self.num_gpus // 2

    @property
    def num_even(self) -> int:
        """Workers that score, and as many that train."""
        return self.num_gpus // 4

    @property
    def batch_size(self) -> int:
        """Prompts per rollout."""
        return PROMPTS_PER_ENGINE * self.num_engines


class Steps:
    """A tracker that reads the counters of the wire at every step."""

    def __init__(self, wire: Wire, now: Callable[[], float]) -> None:
        self._wire, self._now = wire, now
        self._last = self._read()
        self.steps: list[dict[str, float]] = []

    def _read(self) -> dict[str, float]:
        wire = self._wire
        cpu_s = time.process_time() - wire.workers_cpu_s
        counted = {
            "cpu_s": cpu_s,
            "calls": float(wire.calls_by_method.total()),
            "bytes": float(wire.num_bytes),
            "s": self._now(),
        }
        return counted | {f"busy/{name}": seconds for name, seconds in wire.busy_s.items()}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the metrics with what was counted since the last step."""
        read = self._read()
        own = {name: value - self._last.get(name, 0.0) for name, value in read.items()}
        self.steps.append({**metrics, **own, "most_in_flight": float(self._wire.most_in_flight)})
        self._last = read
        self._wire.most_in_flight = 0

    def alert(self, name: str, text: str, step: int) -> None:
        """There are none."""

    def ignored(self, *args: Any, **options: Any) -> None:
        """Nothing to show."""

    start = image = video = sound = table = finish = close = ignored


def steps_of(
    sizes: Sizes,
    num_rollouts: int,
    wire: Wire,
    now: Callable[[], float],
    *,
    requests: int = REQUESTS_PER_ROLLOUT,
    window: int = 1,
    at_once: int | None = None,
    lends: bool = False,
    cuts_calls: bool = False,
) -> list[dict[str, float]]:
    """A whole run of the asynchronous loop; the metrics and counts of each step.

    requests: per rollout. window, at_once, cuts_calls: see `AsyncTrainer`. lends: engines are on the GPUs that train,
    too.
    """
    LATENCIES["score_track"] = Latency(REWARD_S * REQUESTS_PER_ROLLOUT / requests, 0.25)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        rows = [
            {"prompt": f"a question {n} of an ordinary length", "prompt_id": f"p{n}"}
            for n in range(4 * sizes.batch_size)
        ]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        members = [Member(number, wire) for number in range(sizes.num_engines + sizes.num_even * lends)]
        pool = ServedPool("engines", members.__getitem__, len(members), Objects(), num_devices=len(members))
        reward = Fleet(lambda context: {"reward": Reward()}, sizes.num_even, wire)
        train = Fleet(lambda context: {"stack": Stack(), "checkpointer": NoCheckpoints()}, sizes.num_even, wire)
        groups = WorkerGroups(
            train,
            {"engine": pool, "reward": reward},
            led={"sync": (sync := Sync(pool))},
            pools={"train": train, "engine": pool, "reward": reward},
        )
        tracker = Steps(wire, now)
        lent = LentMembers(pool, range(sizes.num_engines, len(members)), ["engine"])
        loop: Any = AsyncTrainer
        if lends:
            loop = functools.partial(HybridTrainer, lending=Lending([lent], Handover(cuts_calls=True, sleeps=True)))
        with groups as runtime:
            assemble(
                runtime,
                TrainerSettings(recipe="scale", seed=0, batch_size=sizes.batch_size, num_rollouts=num_rollouts),
                modality=TextModality(),
                data=MultimodalRLDataSource(str(prompts)),
                sampling=ARSamplingParams(samples_per_prompt=REPEATS, temperature=1.0),
                advantages=AdvantageConfig(),
                evaluator=None,
                guardrails=functools.partial(Guardrails, GuardrailConfig(action="off")),
                trackers=[tracker],
                run_dir=Path(folder),
                config={"recipe": "scale"},
                stop=threading.Event(),
                sync=sync,
                collects_ahead=True,
                takes_older=True,
                loop=functools.partial(
                    loop,
                    max_staleness=MAX_STALENESS,
                    groups_per_request=sizes.batch_size // requests,
                    window=window,
                    requests_at_once=at_once,
                    cuts_calls=cuts_calls,
                    log=OrderLog(Path(folder) / REQUESTS),
                ),
            ).run()
        return tracker.steps


def simulated(
    num_gpus: int, num_rollouts: int, aside: Callable[[], Any] = contextlib.nullcontext, **schedule: Any
) -> list[dict[str, float]]:
    """A run on virtual time. aside: see `Wire`. schedule: see `steps_of`."""
    threads = VirtualThreads()
    with threads.running():
        wire = Wire(threads.sleep, lambda event, seconds: event.wait(seconds), aside=aside)
        return steps_of(Sizes(num_gpus), num_rollouts, wire, lambda: threads.now_s, **schedule)


HEAD = {
    "GPUs": "",
    "prompts": "",
    "step": "s",
    "driver CPU": "s",
    "share": "%",
    "calls": "",
    "through the driver": "MB",
    "most in flight": "",
    "requests waiting": "",
    "lag newest": "",
    "lag oldest": "",
    "engines busy": "%",
    "rewards busy": "%",
    "train busy": "%",
}


def row(num_gpus: int, steps: Sequence[Mapping[str, float]]) -> list[str]:
    """A line of the table: means over the steps."""
    sizes, count = Sizes(num_gpus), len(steps)
    mean = {name: sum(step.get(name, 0.0) for step in steps) / count for name in steps[-1]}
    busy = [
        mean[f"busy/{name}"] / mean["s"] / workers if mean["s"] else math.nan
        for name, workers in (
            ("generate", sizes.num_engines),
            ("score_track", sizes.num_even),
            ("train", sizes.num_even),
        )
    ]
    share = mean["cpu_s"] / mean["s"] if mean["s"] else math.nan
    return [
        f"{num_gpus:,}",
        f"{sizes.batch_size:,}",
        f"{mean['s']:.0f}",
        f"{mean['cpu_s']:.2f}",
        f"{100 * share:.2f}",
        f"{mean['calls']:,.0f}",
        f"{mean['bytes'] / 1e6:.1f}",
        f"{max(step['most_in_flight'] for step in steps):.0f}",
        f"{mean['schedule/requests_waiting']:.1f}",
        f"{mean['schedule/lag/newest']:.1f}",
        f"{mean['schedule/lag/oldest']:.1f}",
        *(f"{100 * part:.0f}" for part in busy),
    ]


def main() -> None:
    """Run every size, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument(
        "--requests", type=int, default=REQUESTS_PER_ROLLOUT, help="per rollout; rewards are shared out"
    )
    parser.add_argument("--window", type=float, default=0.0, help="schedule.window")
    parser.add_argument("--at-once", type=int, help="schedule.requests_at_once")
    parser.add_argument("--generate-s", type=float, default=100.0, help="mean seconds of a call of an engine")
    parser.add_argument("--retract", action="store_true", help="schedule.on_push: retract")
    parser.add_argument("--lend", action="store_true", help="schedule.kind: hybrid")
    parser.add_argument("--threads", action="store_true", help="ordinary threads, and workers that take no time")
    parser.add_argument("--profile", type=int, metavar="N", help="list what takes the driver's time at N GPUs")
    given = parser.parse_args()
    schedule: dict[str, Any] = {
        "requests": given.requests,
        "window": max(1, math.floor(given.window * given.requests)),
        "at_once": given.at_once,
        "lends": given.lend,
        "cuts_calls": given.retract,
    }
    LATENCIES["generate"] = Latency(given.generate_s, 0.5)
    logging.getLogger("unirl").setLevel(logging.ERROR)  # steps of minutes are what a warning of long waits is about
    if given.profile is not None:
        profiled(given.profile, given.rollouts)
        return
    print("| " + " | ".join(f"{name}, {unit}" if unit else name for name, unit in HEAD.items()) + " |")
    print("|---" * len(HEAD) + "|")
    for num_gpus in given.gpus:
        if given.threads:
            steps = steps_of(Sizes(num_gpus), given.rollouts, Wire(), lambda: 0.0, **schedule)
        else:
            steps = simulated(num_gpus, given.rollouts, **schedule)
        print("| " + " | ".join(row(num_gpus, steps[WARMUP:-MAX_STALENESS])) + " |", flush=True)


def profiled(num_gpus: int, num_rollouts: int) -> None:
    """Functions of the threads of engine, reward and training by the CPU seconds in which they ran, without those in
    which they stood for a worker."""
    profiles: dict[int, cProfile.Profile] = {}
    plain = threading.Thread.run

    @contextlib.contextmanager
    def profiling() -> Generator[None]:
        own = profiles[threading.get_ident()] = cProfile.Profile(time.thread_time)
        own.enable()
        yield
        own.disable()

    @contextlib.contextmanager
    def aside() -> Generator[None]:
        own = profiles.get(threading.get_ident())
        if own is not None:
            own.disable()
        yield
        if own is not None:
            own.enable()

    def run(thread: threading.Thread) -> None:
        is_member = thread.name.startswith("unirl-member")  # of hundreds, which would only be slower
        with contextlib.nullcontext() if is_member else profiling():
            plain(thread)

    with mock.patch.object(threading.Thread, "run", run), profiling():
        simulated(num_gpus, num_rollouts, aside=aside)
    main, *others = profiles.values()
    found = pstats.Stats(main)
    for each in others:
        found.add(each)
    found.sort_stats("tottime").print_stats(25)
    found.sort_stats("cumtime").print_stats("unirl", 40)


if __name__ == "__main__":
    main()
