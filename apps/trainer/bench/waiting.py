"""Environments that wait or compute, for measurements of what stands around them."""

# ruff: noqa: INP001 - next to scripts, no package
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from unirl.rollout.environments.base import Step, Task
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.turns.calls import Turn
from unirl.types.messages import Message

WAIT_S, NUM_EPISODES = 0.4, 16
"""Seconds that answers to all episodes take, one after the other."""
BUSY_S = 2e-3
"""CPU seconds of a move."""


class Waiting(TextEnvironment):
    """Answers after a while."""

    def reset(self, task: Task, seed: int) -> Sequence[Message]:
        return ()

    def step(self, action: Turn) -> Step[Sequence[Message]]:
        time.sleep(WAIT_S / NUM_EPISODES)
        return Step((Message("user", "1"),))


class Busy(gymnasium.Env[np.ndarray, np.ndarray]):
    """Computes for a while per move, as a simulation does."""

    observation_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(8, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        end = time.process_time() + BUSY_S
        while time.process_time() < end:
            pass
        return np.zeros(8, np.float32), 0.0, False, False, {}


gymnasium.register("unirl/Busy-v0", entry_point="waiting:Busy")
