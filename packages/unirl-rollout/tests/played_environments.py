"""Environments that behave and misbehave, in a module that processes of environments import."""

import os
import time
from pathlib import Path
from typing import Any

from unirl.rollout.environments.base import Environment, Step


class Counting(Environment[str, int]):
    """Observes the sum of the lengths of all actions so far, from the seed on. What an action says happens: "raise",
    "hang", "die", "die once", "nan", "other", "memory"."""

    deterministic = True

    def __init__(self, folder: str = "") -> None:
        self._folder = folder

    def reset(self, task: Any, seed: int) -> int:
        if task.get("refuse"):
            raise KeyError("refuse")
        self._total = seed
        return self._total

    def step(self, action: str) -> Any:
        if action == "raise":
            raise RuntimeError("no such move")
        if action == "hang":
            time.sleep(60)
        if action == "die" or (action == "die once" and self._is_first_time(action)):
            os._exit(7)
        if action == "memory":
            bytearray(2**33)
        if action == "other":
            return 3
        self._total += len(action)
        reward = float("nan") if action == "nan" else 1.0
        return Step(self._total, reward, terminated=action == "end", counts={"moves": 1.0})

    def _is_first_time(self, what: str) -> bool:
        path = Path(self._folder) / what
        if path.exists():
            return False
        path.touch()
        return True


class Fickle(Counting):
    """Says that it is deterministic, and is not."""

    def step(self, action: str) -> Any:
        step = super().step(action)
        return Step(os.getpid() + step.observation) if isinstance(step, Step) else step


class Forgetful(Counting):
    """Not deterministic."""

    deterministic = False


class Saved(Counting):
    """Not deterministic, and can be saved."""

    deterministic = False
    resumable = True
