"""How much of the slowest part's own throughput each schedule reaches, where parts take a controlled time.

    uv run python apps/trainer/bench/schedules.py [--rollouts 40] [--second 0.25] [--spread 0.3]

The real collector, loops and learner; engine, reward and training sleep, so that any machine can run it. A rollout of
16 prompts takes 2, 1 and 1 units of time, or 1, 2 and 1, or 1, 1 and 2; single calls take more or less (log-normal).
The slowest part's own throughput is that of a run in which it never waits. Writes a table.
"""

# ruff: noqa: INP001, T201 - a script, no package
from __future__ import annotations

import argparse
import functools
import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from idle_roles import IdleStack, NoCheckpoints

from unirl.algorithms.advantages import AdvantageConfig
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import LocalRuntime
from unirl.train.stack import TrainStepResult
from unirl.trainer.base import Trainer
from unirl.trainer.build.assembly import assemble
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.loops.asynchronous import AsyncTrainer
from unirl.trainer.loops.pipelined import PipelinedTrainer
from unirl.trainer.settings import TrainerSettings
from unirl.trainer.text import TextModality
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams

PROMPTS, REPEATS = 16, 8
SCHEDULES: dict[str, dict[str, int] | None] = {
    "sync": None,
    "async, 0 versions, requests of 4 prompts": {"max_staleness": 0, "groups_per_request": 4},
    "pipelined, requests of 4 prompts": {"groups_per_request": 4},
    "pipelined, requests of 1 prompt": {"groups_per_request": 1},
    "one_step_off": {"max_staleness": 1},
    "async, 1 version, requests of 4 prompts": {"max_staleness": 1, "groups_per_request": 4},
    "async, 2 versions": {"max_staleness": 2},
    "async, 2 versions, requests of 4 prompts": {"max_staleness": 2, "groups_per_request": 4},
}
SHARES = {"2 : 1 : 1": (2.0, 1.0, 1.0), "1 : 2 : 1": (1.0, 2.0, 1.0), "1 : 1 : 2": (1.0, 1.0, 2.0)}


class Sleeper:
    """Takes some seconds per rollout, in proportion to its samples, one call longer than another."""

    def __init__(self, per_rollout_s: float, spread: float, seed: int) -> None:
        self._per_sample_s = per_rollout_s / (PROMPTS * REPEATS)
        self._draw = random.Random(seed)  # noqa: S311 - a simulation
        self._spread = spread
        self.slept_s = 0.0

    def work(self, num_samples: int) -> None:
        """Sleep; the mean of the factor is 1."""
        factor = self._draw.lognormvariate(-(self._spread**2) / 2, self._spread)
        before = time.monotonic()
        time.sleep(self._per_sample_s * num_samples * factor)
        self.slept_s += time.monotonic() - before


class Engine(Sleeper):
    """Makes empty samples."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """All are welcome."""

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One per row."""
        self.work(req.batch_size)
        return RolloutResp(tracks={"text": req.make_root_track(conditions={}, segment=None, decoded=None)})


class Reward(Sleeper):
    """Scores at random."""

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def score_track(self, resp: RolloutResp, track: str, *, is_training: bool = True) -> dict[str, float]:
        """A number per sample."""
        own = resp.tracks[track]
        self.work(own.batch_size)
        resp.tracks[track] = own.replace(rewards=torch.rand(own.batch_size), reward_errors=[None] * own.batch_size)
        return {}


class Stack(Sleeper, IdleStack):
    """Trains nothing."""

    num_parts = 0
    """Parts so far."""

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def exact_ratios(self) -> list[str]:
        """There are none."""
        return []

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def train(self, resp: RolloutResp, *, progress: float) -> TrainStepResult:
        """Take the time."""
        self.work(resp.batch_size)
        return TrainStepResult({})

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def train_part(self, resp: RolloutResp, *, progress: float, num_parts: int) -> TrainStepResult | None:
        """Take the time of a part."""
        self.work(resp.batch_size)
        self.num_parts += 1
        return None if self.num_parts % num_parts else TrainStepResult({})


def main() -> None:
    """Run every schedule at every ratio, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--second", type=float, default=0.25, help="real seconds of one unit of time")
    parser.add_argument("--spread", type=float, default=0.3, help="sigma of the log-normal factor of a call")
    given = parser.parse_args()
    print("| schedule | " + " | ".join(f"{name}" for name in SHARES) + " |")
    print("|---" * (len(SHARES) + 1) + "|")
    for name, schedule in SCHEDULES.items():
        cells = [share(schedule, tuple(given.second * unit for unit in units), given) for units in SHARES.values()]
        print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)


def share(schedule: dict[str, int] | None, seconds: tuple[float, ...], given: argparse.Namespace) -> float:
    """Seconds that the busiest part worked over those that the run took."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(1000)), encoding="utf-8")
        parts = [
            kind(per_rollout_s, given.spread, seed)
            for seed, (kind, per_rollout_s) in enumerate(zip((Engine, Reward, Stack), seconds, strict=True))
        ]
        roles = dict(zip(("engine", "reward", "stack"), parts, strict=True)) | {"checkpointer": NoCheckpoints()}
        with LocalRuntime(lambda context: roles) as runtime:
            trainer = assemble(
                runtime,
                TrainerSettings(recipe="sleep", seed=0, batch_size=PROMPTS, num_rollouts=given.rollouts),
                modality=TextModality(),
                data=MultimodalRLDataSource(str(prompts)),
                sampling=ARSamplingParams(samples_per_prompt=REPEATS, temperature=1.0),
                advantages=AdvantageConfig(),
                evaluator=None,
                guardrails=functools.partial(Guardrails, GuardrailConfig(action="off")),
                trackers=[],
                run_dir=Path(folder),
                config={},
                stop=threading.Event(),
                collects_ahead=schedule is not None,
                takes_older=schedule is not None and schedule.get("max_staleness", 0) > 0,
                loop=_loop(schedule),
            )
            begun = time.monotonic()
            trainer.run()
            return max(part.slept_s for part in parts) / (time.monotonic() - begun)


def _loop(schedule: dict[str, int] | None) -> Any:  # Any: a trainer, or one with arguments
    if schedule is None:
        return Trainer
    return functools.partial(AsyncTrainer if "max_staleness" in schedule else PipelinedTrainer, **schedule)


if __name__ == "__main__":
    main()
