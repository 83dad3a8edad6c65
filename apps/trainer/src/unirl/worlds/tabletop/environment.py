"""The tabletop in Gymnasium's API: one table, and many at once.

The action is the next move, [2] in [-1, 1]; the observation an image, uint8 [3, 64, 64]. The reward is 1 when the block
comes home, which ends the episode, and 0 else; after `MAX_MOVES` moves an episode is cut off.
Legend: B tables, H moves of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from unirl.worlds.tabletop.physics import SIZE, image_of, is_home, moved, start_of, starts_of

ENV_ID = "unirl/TabletopPush-v0"
MAX_MOVES = 32
SEED_RANGE = 2**31
"""Where an episode is started without a seed, one below this is drawn."""

IMAGE = gym.spaces.Box(0, 255, (3, SIZE, SIZE), np.uint8)
MOVE = gym.spaces.Box(-1, 1, (2,), np.float32)


class TabletopPush(gym.Env[NDArray[np.uint8], NDArray[np.float32]]):
    """One table. The same seed gives the same start."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = IMAGE
    action_space = MOVE

    def __init__(self, render_mode: str | None = "rgb_array") -> None:
        self.render_mode = render_mode
        self._state = start_of(0)[None]
        self._num_moves = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self._state = start_of(int(self.np_random.integers(SEED_RANGE)) if seed is None else seed)[None]
        self._num_moves = 0
        return image_of(self._state)[0], {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self._state = moved(self._state, np.asarray(action, np.float32)[None])
        self._num_moves += 1
        is_done = bool(is_home(self._state)[0])
        is_cut = not is_done and self._num_moves >= MAX_MOVES
        return image_of(self._state)[0], float(is_done), is_done, is_cut, {"is_success": is_done}

    def render(self) -> NDArray[np.uint8]:
        """uint8 [64, 64, 3], as Gymnasium has images of people."""
        return image_of(self._state)[0].transpose(1, 2, 0)


class TabletopPushVector(VectorEnv[NDArray[np.uint8], NDArray[np.float32], NDArray[Any]]):
    """`num_envs` tables at once, started again only by `reset`, with `options["reset_mask"]` some of them.

    A table whose episode has ended stands still. `play_chunk` makes several moves and draws images after the last.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_fps": 10}

    def __init__(self, num_envs: int, render_mode: str | None = None) -> None:
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.single_observation_space, self.single_action_space = IMAGE, MOVE
        self.observation_space = batch_space(IMAGE, num_envs)
        self.action_space = batch_space(MOVE, num_envs)
        self._state = starts_of([0] * num_envs)
        self._num_moves = np.zeros(num_envs, np.int64)
        self._has_ended = np.zeros(num_envs, np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """An integer seeds the tables with it and the numbers after it."""
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        seeds = [None] * self.num_envs if seed is None else seed
        if isinstance(seeds, int):
            seeds = list(range(seeds, seeds + self.num_envs))
        for row in np.flatnonzero(mask):
            own = seeds[row]
            self._state[row] = start_of(int(self.np_random.integers(SEED_RANGE)) if own is None else own)
        self._num_moves[mask] = 0
        self._has_ended[mask] = False
        return image_of(self._state), {}

    def step(self, actions: NDArray[np.float32]) -> tuple[NDArray[np.uint8], Any, Any, Any, dict[str, Any]]:
        images, rewards, terminated, truncated, info = self.play_chunk(
            np.asarray(actions)[:, None], np.ones(self.num_envs, np.bool_)
        )
        return images, rewards, terminated, truncated, {"is_success": info["is_success"]}

    def play_chunk(
        self, actions: NDArray[np.float32], is_live: NDArray[np.bool_]
    ) -> tuple[NDArray[np.uint8], Any, Any, Any, dict[str, Any]]:
        """As `step`, with moves [B, H, 2] one after the other, each table until its episode ends.

        is_live: [B], tables that move; images of the others are left black. Rewards [B] are summed; info has
        `num_moves` [B] that were made.
        """
        rewards, num_moves = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        for each in range(actions.shape[1]):
            rows = np.flatnonzero(is_live & ~self._has_ended)
            if not len(rows):
                break
            self._state[rows] = moved(self._state[rows], actions[rows, each])
            num_moves[rows] += 1
            self._num_moves[rows] += 1
            home = is_home(self._state[rows])
            rewards[rows] += home
            terminated[rows] = home
            truncated[rows] = ~home & (self._num_moves[rows] >= MAX_MOVES)
            self._has_ended[rows] = terminated[rows] | truncated[rows]
        images = np.zeros((self.num_envs, *IMAGE.shape), np.uint8)
        images[is_live] = image_of(self._state[is_live])
        return images, rewards, terminated, truncated, {"is_success": terminated, "num_moves": num_moves}


gym.register(
    ENV_ID,
    entry_point="unirl.worlds.tabletop.environment:TabletopPush",
    vector_entry_point="unirl.worlds.tabletop.environment:TabletopPushVector",
)
