"""An environment with images that pays for every move to the right: `dense_room:tests/DenseRoom-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class DenseRoom(gym.Env[Any, Any]):
    """An image whose brightness is where the hand is; 8 moves of two numbers."""

    metadata = {"render_modes": [], "render_fps": 20}

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (3, 64, 64), np.uint8)
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def _seen(self) -> Any:
        return np.full((3, 64, 64), int(np.clip(128 + 20 * self.place, 0, 255)), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.moves = float(self.np_random.uniform(-1, 1)), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += float(action[0])
        self.moves += 1
        return self._seen(), float(action[0]), self.moves == 8, False, {}


gym.register("tests/DenseRoom-v0", entry_point="dense_room:DenseRoom")
