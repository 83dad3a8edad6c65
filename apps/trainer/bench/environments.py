"""What environments cost: `python apps/trainer/bench/environments.py [--rounds 3]`.

1. Steps per second of our processes against gymnasium's AsyncVectorEnv, the same environment, as many processes; ratios
are taken in pairs, and the median is printed.
2. Turns with `pipeline_stages` 1 and 2, where model and environment each wait as long.
"""

# ruff: noqa: INP001, T201 - a script next to others; the result is the output
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from waiting import NUM_EPISODES, WAIT_S, Waiting

from unirl.rollout.environments.gymnasium_processes import GymnasiumProcesses
from unirl.rollout.turns.engine import TurnsEngine
from unirl.types.conditions import PromptCondition
from unirl.types.media import Texts
from unirl.types.messages import Message
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

NUM_ENVIRONMENTS, CHUNK, NUM_CHUNKS = 8, 4, 40
NUM_TURNS = 10


def ours(name: str) -> float:
    """Moves per second of our processes."""
    played = GymnasiumProcesses(name, num_processes=NUM_ENVIRONMENTS, max_moves=10**6)
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

    def encode(self, primitives: Any, params: ARSamplingParams) -> dict[str, PromptCondition]:  # Any: texts
        return {"prompt": PromptCondition.pack(tokens=[torch.tensor([1])] * len(primitives["text"].texts))}

    def bridge(self, messages: Sequence[Message]) -> list[int]:
        return [8] * len(messages)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ids", nargs="+", default=["MountainCarContinuous-v0", "waiting:unirl/Busy-v0"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.ids:
        pairs = [(ours(name), theirs(name)) for _ in range(arguments.rounds)]
        ratio = statistics.median(own / other for own, other in pairs)
        own, other = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        print(f"{name}: {own:,.0f} moves/s, AsyncVectorEnv {other:,.0f}: {ratio:.2f}x")
    waits = [(turns(1), turns(2)) for _ in range(arguments.rounds)]
    ratio = statistics.median(one / two for one, two in waits)
    print(f"pipeline_stages 2 against 1, equal waits: {ratio:.2f}x (at most {2 * NUM_TURNS / (NUM_TURNS + 0.5):.2f})")


if __name__ == "__main__":
    main()
