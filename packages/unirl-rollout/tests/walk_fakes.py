"""Environments and a policy whose course is known in advance."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from unirl.types.actions import ActionSegment, DrawnChunks, Observations
from unirl.types.sampling import ActionSamplingParams

LENGTH = 5
"""Moves of an episode that starts with the seed 0; the seed is added."""


class Walk(gym.Env[Any, Any]):
    """The state is (seed, moves so far, sum of the moves). Ends after LENGTH + seed moves; the reward is the move.

    fault: what goes wrong at the third move, or at the start, if anything; only: in the episode with this seed alone.
    ends: "terminated" or "truncated".
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self,
        fault: str | None = None,
        only: int | None = None,
        ends: str = "terminated",
        render_mode: str | None = None,
    ) -> None:
        self.observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float32)
        self.action_space = gym.spaces.Box(np.array([-1], np.float32), np.array([3], np.float32))
        self.fault, self.only, self.ends, self.render_mode = fault, only, ends, render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.fault == "no start" and self.only in (None, seed):
            raise ValueError("no table")
        self.state = np.array([seed or 0, 0, 0], np.float32)
        return self.state.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.state += np.array([0, 1, action[0]], np.float32)
        is_over = self.state[1] >= LENGTH + self.state[0]
        observation: Any = self.state.copy()
        reward = float(action[0])
        if self.state[1] == 3 and self.only in (None, self.state[0]):
            if self.fault == "hangs":
                time.sleep(60)
            if self.fault == "dies":
                os._exit(3)
            if self.fault == "raises":
                raise ValueError("the arm is stuck")
            observation = {"nan": observation * np.nan, "shape": observation[:2]}.get(str(self.fault), observation)
            reward = float("inf") if self.fault == "reward" else reward
        ended = (is_over and self.ends == "terminated", is_over and self.ends == "truncated")
        return observation, reward, *ended, {"is_success": is_over}

    def render(self) -> Any:
        return np.full((16, 16, 3), int(self.state[1]), np.uint8)


class WalkVector(VectorEnv[Any, Any, Any]):
    """The same, batched, which must be reset after an episode ends before any row may step again."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_fps": 20}

    def __init__(self, num_envs: int, **options: Any) -> None:
        self.envs = [Walk(**options) for _ in range(num_envs)]
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = (
            self.envs[0].observation_space,
            self.envs[0].action_space,
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.ended = np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        for row, env in enumerate(self.envs):
            if mask[row]:
                env.reset(seed=None if seed is None else seed[row])
        self.ended[mask] = False
        return np.stack([env.state for env in self.envs]), {}

    def step(self, actions: Any) -> Any:
        assert not self.ended.any(), "a row that has ended was not reset"
        found = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        observations, rewards, terminated, truncated, infos = zip(*found, strict=True)
        self.ended = np.array(terminated) | np.array(truncated)
        success = np.array([info["is_success"] for info in infos])
        return (
            np.stack(observations),
            np.array(rewards),
            np.array(terminated),
            np.array(truncated),
            {"is_success": success, "_is_success": np.ones(self.num_envs, np.bool_)},
        )


class Mixed(gym.Env[Any, Any]):
    """A Dict of an image with channels last and numbers; three choices of an action."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {
                "camera": gym.spaces.Box(0, 255, (16, 20, 3), np.uint8),
                "joints": gym.spaces.Box(-1, 1, (2, 2), np.float64),
                "goal": gym.spaces.Box(-1, 1, (1,), np.float32),
            }
        )
        self.action_space = gym.spaces.Discrete(3, start=1)
        self.actions: list[int] = []

    def _seen(self) -> dict[str, Any]:
        camera = np.zeros((16, 20, 3), np.uint8)
        camera[2, 5] = (1, 2, 3)
        return {"camera": camera, "joints": np.arange(4.0).reshape(2, 2) / 10, "goal": np.array([0.5], np.float32)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return self._seen(), 0.0, False, False, {}


gym.register("fakes/Walk-v0", entry_point="walk_fakes:Walk")
gym.register("fakes/WalkLimited-v0", entry_point="walk_fakes:Walk", max_episode_steps=4)
gym.register("fakes/WalkBatched-v0", entry_point="walk_fakes:Walk", vector_entry_point="walk_fakes:WalkVector")
gym.register("fakes/Mixed-v0", entry_point="walk_fakes:Mixed")


class Steady:
    """Always moves by what its state says: the seed of the episode, as far as bounds allow; tokens are 0.

    The log-prob of a number is minus the number of its move within the chunk.
    """

    image_shape = None
    state_size = 3

    def __init__(self, chunk: int = 2, action_size: int = 1) -> None:
        self.chunk_shape = (chunk, action_size)
        self.keys: list[str] = []
        self.num_draws = 0

    def draw(self, seen: Observations, params: ActionSamplingParams, *, noise_keys: Sequence[str]) -> DrawnChunks:
        assert seen.states is not None
        self.keys += noise_keys
        self.num_draws += 1
        height, width = self.chunk_shape
        moves = (seen.states[:, 0] / 4 - 0.5).clamp(-1, 1)[:, None, None].expand(-1, height, width).clone()
        tokens = torch.zeros(moves.shape, dtype=torch.long)
        densities = -torch.arange(float(height))[None, None, :, None].expand(len(moves), 1, height, width)
        return DrawnChunks(moves=moves, tokens=tokens, densities=densities)

    def log_probs(self, densities: Tensor, num_moves: Tensor) -> Tensor:
        is_executed = (torch.arange(self.chunk_shape[0]) < num_moves[:, None])[:, :, None]
        return torch.where(is_executed, densities[:, 0], 0.0).flatten(1)

    def segment_fields(self, params: ActionSamplingParams) -> dict[str, object]:
        return {}

    def replay(self, segment: ActionSegment, decision_N: Tensor, params: ActionSamplingParams) -> Any:
        raise NotImplementedError

    def encode_prompts(self, texts: Sequence[str]) -> Tensor | None:
        return None

    def features(self, seen: Observations) -> Tensor:
        raise NotImplementedError

    def evaluating(self) -> Any:
        return nullcontext()
