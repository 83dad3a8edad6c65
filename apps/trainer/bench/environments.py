"""What environments cost: `python apps/trainer/bench/environments.py [--rounds 3] [--only pools|turns]`.

1. Steps per second of our processes against gymnasium's AsyncVectorEnv, the same environment, as many processes; ratios
are taken in pairs, and the median is printed.
2. The same processes in a pool of kind env, in this process and as an actor of Ray, against those next to the engine.
3. Turns with `pipeline_stages` 1 and 2, where model and environment each wait as long.
4. Two workers of an engine that write in turn, and an environment that takes as long: all processes in a pool, against
half of them next to each worker.
"""

# ruff: noqa: INP001, T201 - a script next to others; the result is the output
from __future__ import annotations

import argparse
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import gymnasium
import numpy as np
import torch
from waiting import NUM_EPISODES, WAIT_S, Waiting

from unirl.distributed.group.framework import ray_module
from unirl.distributed.group.ray_hosting import HostingPlan, RayHostedPool
from unirl.distributed.pools.hosting import HostedPool, LocalHosting
from unirl.rollout.environments.gymnasium_processes import GymnasiumProcesses
from unirl.rollout.environments.pool_member import PoolMember
from unirl.rollout.environments.pooled import PooledEnvironments
from unirl.rollout.environments.workers import EnvironmentWorkers
from unirl.rollout.turns.calls import Turn
from unirl.rollout.turns.engine import TurnsEngine
from unirl.types.conditions import Bridge, PromptCondition
from unirl.types.media import Texts
from unirl.types.messages import Message
from unirl.types.protocols.hosting import HostingPool
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
NUM_ENVIRONMENTS, CHUNK, NUM_CHUNKS = 8, 4, 40
NUM_TURNS = 10


def ours(name: str, pool: HostingPool | None = None) -> float:
    """Moves per second of our processes, next to us or in a pool."""
    if pool is None:
        played = GymnasiumProcesses(name, num_processes=NUM_ENVIRONMENTS, max_moves=10**6)
    else:
        played = GymnasiumProcesses(name, pool=pool.name, max_moves=10**6)
        played.play_in(pool)
    size = played.spaces.action_size
    try:
        played.start(list(range(NUM_ENVIRONMENTS)))
        moves = np.zeros((NUM_ENVIRONMENTS, CHUNK, size), np.float32)
        rows = list(range(NUM_ENVIRONMENTS))
        played.play(rows, moves)
        started, num = time.perf_counter(), 0
        for _ in range(NUM_CHUNKS):
            num += int(played.play(rows, moves).num_moves.sum())
        return num / (time.perf_counter() - started)
    finally:
        played.close()


def theirs(name: str) -> float:
    """Moves per second of AsyncVectorEnv."""
    vector = gymnasium.make_vec(name, NUM_ENVIRONMENTS, vectorization_mode="async")
    try:
        vector.reset(seed=0)
        moves = np.zeros_like(vector.action_space.sample())
        vector.step(moves)
        started = time.perf_counter()
        for _ in range(NUM_CHUNKS * CHUNK):
            vector.step(moves)
        return NUM_CHUNKS * CHUNK * NUM_ENVIRONMENTS / (time.perf_counter() - started)
    finally:
        vector.close()


class WaitingEngine:
    """Writes two tokens after a while, which takes half as long for half as many."""

    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        time.sleep(WAIT_S * req.batch_size / NUM_EPISODES)
        segment = TextSegment.pack(
            tokens=[torch.tensor([1, 9])] * req.batch_size,
            log_probs=[torch.zeros(2)] * req.batch_size,
            params=req.sampling_params,
        )
        track = req.make_root_track(conditions={}, segment=segment, decoded=Texts(texts=["1"] * req.batch_size))
        return RolloutResp(tracks={"text": track})

    def shutdown(self) -> None:
        """Nothing runs."""


class Numbers:
    """A codec of numbers."""

    context_length = 10**6
    vocabulary: dict[str, int] = {}
    media_tokens: frozenset[int] = frozenset()
    reads_images_in_turns = False

    def encode(self, primitives: Any, params: ARSamplingParams) -> dict[str, PromptCondition]:  # Any: texts
        return {"prompt": PromptCondition.pack(tokens=[torch.tensor([1])] * len(primitives["text"].texts))}

    def bridge(self, messages: Sequence[Message]) -> Bridge:
        return Bridge([8] * len(messages))


def turns(stages: int) -> float:
    """Seconds of a rollout."""
    parts: Any = WaitingEngine(), Numbers()  # the part of an engine and a codec that turns ask
    engine = TurnsEngine(*parts, environment=Waiting(), max_turns=NUM_TURNS, pipeline_stages=stages)
    names = [f"s{row}" for row in range(NUM_EPISODES)]
    req = RolloutReq(
        sample_ids=names,
        group_ids=names,
        primitives={"text": Texts(texts=["1"] * NUM_EPISODES)},
        sampling_params=ARSamplingParams(temperature=1.0, max_new_tokens=2),
    )
    engine.generate(req)  # starts the processes
    started = time.perf_counter()
    engine.generate(req)
    took_s = time.perf_counter() - started
    engine.shutdown()
    return took_s


@contextmanager
def local_pool(num_processes: int = NUM_ENVIRONMENTS) -> Generator[HostingPool]:
    """A pool in this process."""
    pool = HostedPool("env", lambda _, key: LocalHosting(key, lambda: PoolMember(num_processes)), 1)
    yield pool
    pool.close()


@contextmanager
def ray_pool() -> Generator[HostingPool]:
    """A pool of one actor."""
    make = functools.partial(PoolMember, NUM_ENVIRONMENTS)
    pool = RayHostedPool.started(HostingPlan("env", make, num_members=1), [], 120.0)
    yield pool
    pool.close()


def pooled(name: str, make: Callable[[], AbstractContextManager[HostingPool]]) -> float:
    """Moves per second of a new pool."""
    with make() as pool:
        return ours(name, pool)


def two_workers(num_processes: int, pool: HostingPool | None) -> float:
    """Episodes per second of two workers, each of which plays half of the episodes, one with a delay of half a round.

    num_processes: of all.
    """
    thinks_s = WAIT_S / num_processes * 2
    workers: list[Any] = []
    for _ in range(2):
        if pool is None:
            workers.append(EnvironmentWorkers(Waiting(), num_workers=num_processes // 2, step_timeout_s=60.0))
        else:
            workers.append(PooledEnvironments(Waiting(), pool, at="turns", step_timeout_s=60.0))
    half = [f"s{row}" for row in range(NUM_EPISODES)]

    def play(number: int) -> None:
        own = workers[number]
        own.reset({name: ({}, 0) for name in half})
        begin.wait()
        time.sleep(number * thinks_s)
        for _ in range(NUM_TURNS):
            time.sleep(thinks_s)
            own.step({name: Turn("1") for name in half})

    begin = threading.Barrier(3)
    threads = [threading.Thread(target=play, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    begin.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - started
    for own in workers:
        own.close()
    return 2 * NUM_EPISODES * NUM_TURNS / took_s


def pools(ids: Sequence[str], rounds: int) -> None:
    """Print what a pool costs, and what it gains where workers write in turn."""
    ray = ray_module()
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    for name in ids:
        found = [(ours(name), pooled(name, local_pool), pooled(name, ray_pool)) for _ in range(rounds)]
        own, here, there = (statistics.median(each[side] for each in found) for side in range(3))
        ratios = [statistics.median(each[side] / each[0] for each in found) for side in (1, 2)]
        print(
            f"{name}: next to the engine {own:,.0f} moves/s, pool in the trainer {here:,.0f}: {ratios[0]:.2f}x, "
            f"pool of Ray {there:,.0f}: {ratios[1]:.2f}x"
        )
    ray.shutdown()
    shared = []
    for _ in range(rounds):
        with local_pool(8) as pool:
            shared.append((two_workers(8, None), two_workers(8, pool)))
    own, there = (statistics.median(each[side] for each in shared) for side in (0, 1))
    ratio = statistics.median(pool / apart for apart, pool in shared)
    print(f"two workers in turn, 8 processes: {own:.0f} turns/s in pairs, {there:.0f} in a pool: {ratio:.2f}x")


def pipelined(rounds: int) -> None:
    """Print what a second part of a batch saves."""
    waits = [(turns(1), turns(2)) for _ in range(rounds)]
    ratio = statistics.median(one / two for one, two in waits)
    print(f"pipeline_stages 2 against 1, equal waits: {ratio:.2f}x (at most {2 * NUM_TURNS / (NUM_TURNS + 0.5):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ids", nargs="+", default=["MountainCarContinuous-v0", "waiting:unirl/Busy-v0"])
    parser.add_argument("--only", choices=["pools", "turns"], help="what is measured; default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only == "pools":
        pools(arguments.ids, arguments.rounds)
        return
    if arguments.only == "turns":
        pipelined(arguments.rounds)
        return
    for name in arguments.ids:
        pairs = [(ours(name), theirs(name)) for _ in range(arguments.rounds)]
        ratio = statistics.median(own / other for own, other in pairs)
        own, other = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        print(f"{name}: {own:,.0f} moves/s, AsyncVectorEnv {other:,.0f}: {ratio:.2f}x")
    pools(arguments.ids, arguments.rounds)
    pipelined(arguments.rounds)


if __name__ == "__main__":
    main()
