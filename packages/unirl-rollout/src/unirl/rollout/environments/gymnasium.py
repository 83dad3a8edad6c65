"""Any environment of gymnasium by its id, in this process: one object per episode, or its batched class.

Legend: see `unirl.rollout.environments.vector`.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from unirl.rollout.environments.base import reason_of
from unirl.rollout.environments.vector import (
    Bools,
    Bytes,
    EnvironmentFault,
    Floats,
    Played,
    Seen,
    Spaces,
    VectorEnvironment,
    checked,
)
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError, as_sentence

try:
    import gymnasium as gym
    from gymnasium.vector import AutoresetMode, VectorEnv
except ModuleNotFoundError as error:
    raise ImportError(
        f"environments of gymnasium need {error.name}. Install it with: pip install 'unirl-rollout[gymnasium]'"
    ) from error

logger = logging.getLogger(__name__)

SUCCESS = ("is_success", "success")
"""Names under which environments say that an episode has succeeded."""
PLANES = (1, 3, 4)
"""Channels of an image."""


@runtime_checkable
class PlaysChunks(Protocol):
    """A batched environment that makes several moves in one call, and draws images after the last alone."""

    def play_chunk(
        self, actions: NDArray[Any], is_live: Bools
    ) -> tuple[Any, NDArray[Any], Bools, Bools, dict[str, Any]]:
        """As `VectorEnv.step`, of moves [B, H, D] in the rows [B] that are live, each until its episode ends. Rewards
        are summed; info has `num_moves` [B]."""
        ...


@dataclass(frozen=True)
class _Reader:
    """Takes observations apart by their space."""

    env_id: str
    images: tuple[str | None, ...]
    """Key of the image; none, or one. The key None stands for the observation itself."""
    states: tuple[str | None, ...]
    """Keys of the numbers that are joined to the state."""
    boxes: Mapping[str | None, gym.spaces.Box]
    has_planes_last: bool = False

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        for key in self.images:
            shape = self.boxes[key].shape
            return (shape[2], shape[0], shape[1]) if self.has_planes_last else (shape[0], shape[1], shape[2])
        return None

    @property
    def state_size(self) -> int | None:
        return sum(math.prod(self.boxes[key].shape) for key in self.states) if self.states else None

    def read(self, observation: Any, num: int) -> Seen:
        """What a batch of `num` observations shows. Raises EnvironmentFault for what is not of the space."""
        images = None
        for key in self.images:
            value = observation if key is None else observation[key]
            images = checked(self._named(key), value, (num, *self.boxes[key].shape), np.uint8)
            images = np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if self.has_planes_last else images
        parts = [
            checked(
                self._named(key),
                observation if key is None else observation[key],
                (num, *self.boxes[key].shape),
                np.float32,
            ).reshape(num, -1)
            for key in self.states
        ]
        return Seen(images, np.concatenate(parts, axis=1) if parts else None)

    def _named(self, key: str | None) -> str:
        return f"{self.env_id}: the observation" if key is None else f"{self.env_id}: {key} of the observation"


def reader_of(space: gym.Space[Any], env_id: str) -> _Reader:
    """How observations of a space are read. Raises ConfigError for a space of another kind."""
    if isinstance(space, gym.spaces.Dict):
        parts: dict[str | None, gym.Space[Any]] = dict(space.spaces)
    else:
        parts = {None: space}
    boxes = {key: each for key, each in parts.items() if isinstance(each, gym.spaces.Box)}
    images = tuple(key for key, box in boxes.items() if box.dtype == np.uint8 and len(box.shape) == 3)
    states = tuple(key for key in boxes if key not in images)
    if len(boxes) < len(parts) or len(images) > 1:
        raise ConfigError(
            f"{env_id}: observations are {space}; a policy sees one image (Box of uint8 with 3 dimensions), numbers "
            "(other Boxes), or a Dict of these. Wrap the environment."
        )
    shape = boxes[images[0]].shape if images else ()
    if images and shape[0] not in PLANES and shape[2] not in PLANES:
        raise ConfigError(f"{env_id}: an image of shape {list(shape)} has its channels neither first nor last.")
    return _Reader(env_id, images, states, boxes, has_planes_last=bool(images) and shape[0] not in PLANES)


def action_of(space: gym.Space[Any], env_id: str) -> tuple[int, Callable[[Floats], NDArray[Any]]]:
    """D, and the function from moves [b, D] in [-1, 1] to actions of the space: a Box with bounds, evenly, or one of n
    choices, of equal parts. Raises ConfigError for another space."""
    if isinstance(space, gym.spaces.Discrete):
        start, count = int(space.start), int(space.n)
        return 1, lambda moves: start + np.clip(((moves[:, 0] + 1) / 2 * count).astype(np.int64), 0, count - 1)
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating) and space.is_bounded():
        low, width = space.low.reshape(-1), (space.high - space.low).reshape(-1)
        shape, dtype = space.shape, space.dtype
        return len(low), lambda moves: (low + (np.clip(moves, -1, 1) + 1) / 2 * width).astype(dtype).reshape(-1, *shape)
    raise ConfigError(
        f"{env_id}: actions are {space}; a policy gives numbers within bounds (a Box of floats) or one of several "
        "choices (Discrete). Wrap the environment."
    )


@bounded("engine.environment")
class GymnasiumEnvironment(VectorEnvironment):
    """An environment by its gymnasium id.

    id: as gymnasium.make takes it; "module:id" imports the module first, which registers it. options: keywords of the
    environment. max_moves: cut episodes off after so many moves; None leaves it to the environment.
    shows: have the environment draw a frame for people after each chunk (render_mode "rgb_array"); an environment whose
    observations are images needs none.
    An environment with a batched class that is started by `reset` alone (AutoresetMode.DISABLED) is played by it.
    An episode whose environment raises, or shows or pays what is not of its space, is lost and the others go on; of a
    batched class, which plays them together, all are.
    Raises ConfigError for an unknown id, and spaces that a policy cannot see or act in.
    """

    is_gymnasium: ClassVar[bool] = True

    def __init__(
        self,
        id: str,
        *,
        options: Mapping[str, Any] | None = None,  # Any: keywords of any environment
        max_moves: PositiveInt | None = None,
        shows: bool = False,
    ) -> None:
        self.id = id
        self._options = dict(options or {})
        self._max_moves = max_moves
        self._shows = shows
        self._spec = _spec(id)
        first = self._made()
        self._reader = reader_of(first.observation_space, id)
        action_size, self._actions = action_of(first.action_space, id)
        self._spaces = Spaces(
            action_size=action_size,
            image_shape=self._reader.image_shape,
            state_size=self._reader.state_size,
            moves_per_second=float(first.metadata.get("render_fps", 10)),
        )
        self._envs: list[gym.Env[Any, Any] | None] = [first]
        """None where the environment of a place raised and is to be made anew."""
        self._batched: VectorEnv[Any, Any, Any] | None = None
        self._has_class = self._spec.vector_entry_point is not None and not shows
        self._frame_shape: tuple[int, ...] | None = None
        """The shape of frames, once one was drawn."""
        self._num_moves: NDArray[np.int64] = np.zeros(0, np.int64)
        self._last: list[Seen] = []
        """What each episode has shown last, where they are played one by one."""
        self._whole = Seen()
        """What all have shown last, where they are played by the batched class."""
        self.lost: list[str | None] = []
        """Why each episode of the last start is lost; None where it is not."""

    @property
    def spaces(self) -> Spaces:
        """Sizes of the environment, with images channels first."""
        return self._spaces

    def start(self, seeds: Sequence[int]) -> Seen:
        """Begin an episode for each seed, with as many environments."""
        self._num_moves, self.lost = np.zeros(len(seeds), np.int64), [None] * len(seeds)
        if self._has_class and self._start_batched(seeds):
            return self._whole
        self._envs += [None] * (len(seeds) - len(self._envs))
        found = [self._started(row, seed) for row, seed in enumerate(seeds)]
        self._last = [self._blank() if seen is None else seen for seen in found]
        return Seen.concat(self._last)

    def play(self, rows: Sequence[int], moves: Floats) -> Played:
        """Make the moves, each episode until it ends. A lost one shows what it showed last."""
        if self._batched is not None:
            return self._play_batched(np.asarray(rows), moves)
        found = [self._played(row, moves[place]) for place, row in enumerate(rows)]
        seen, rewards, made, terminated, truncated, successes = zip(*found, strict=True)
        for row, each in zip(rows, seen, strict=True):
            self._last[row] = each
        return Played(
            seen=Seen.concat(seen),
            rewards=np.array(rewards, np.float64),
            num_moves=np.array(made, np.int64),
            terminated=np.array(terminated, np.bool_),
            truncated=np.array(truncated, np.bool_),
            successes=np.array(successes, np.float64),
            errors=[self.lost[row] for row in rows],
        )

    def close(self) -> None:
        """Close all of them."""
        for env in self._envs:
            if env is not None:
                env.close()
        if self._batched is not None:
            self._batched.close()
        self._envs, self._batched = [], None

    # One by one -------------------------------------------------------------------------------------------------

    def _made(self) -> gym.Env[Any, Any]:
        options = {**self._options, **({"render_mode": "rgb_array"} if self._shows else {})}
        limit = {} if self._max_moves is None else {"max_episode_steps": self._max_moves}
        try:
            return gym.make(self._spec, disable_env_checker=True, **limit, **options)
        except (gym.error.Error, ImportError) as error:
            raise ConfigError(f"engine.environment.id = {self.id}: {as_sentence(error)} Correct the id.") from error

    def _started(self, row: int, seed: int) -> Seen | None:
        """What an episode shows first; None if it is lost."""
        try:
            env = self._envs[row]
            if env is None:
                env = self._envs[row] = self._made()
            return self._with_frame(env, self._reader.read(_with_axis(env.reset(seed=seed)[0]), 1))
        except Exception as error:  # noqa: BLE001 - of any environment; its episode counts as failed and says why
            self._lose(row, error)
            return None

    def _played(self, row: int, moves: Floats) -> tuple[Seen, float, int, bool, bool, float]:
        """What came of the moves of one episode."""
        env = self._envs[row]
        if env is not None:
            try:
                return self._play_one(env, moves)
            except Exception as error:  # noqa: BLE001 - as above
                self._lose(row, error)
        return self._last[row], 0.0, 1, False, False, math.nan

    def _lose(self, row: int, error: Exception) -> None:
        """Give an episode up, and its environment, which may be in any state."""
        self.lost[row] = f"{self.id}: {reason_of(error)}"
        broken, self._envs[row] = self._envs[row], None
        _close_broken(broken, self.id)

    def _play_one(self, env: gym.Env[Any, Any], moves: Floats) -> tuple[Seen, float, int, bool, bool, float]:
        total, success = 0.0, math.nan
        seen, terminated, truncated, made = Seen(), False, False, 0
        for action in self._actions(moves):
            observation, reward, terminated, truncated, info = env.step(
                int(action) if isinstance(action, np.integer) else action
            )
            made += 1
            seen = self._reader.read(_with_axis(observation), 1)
            total += self._finite(reward)
            success = _success(info, success)
            if terminated or truncated:
                break
        seen = self._with_frame(env, seen)
        return seen, total, made, bool(terminated), bool(truncated and not terminated), success

    def _finite(self, reward: Any) -> float:
        if not math.isfinite(float(reward)):
            raise EnvironmentFault(f"a reward of {reward} is not finite")
        return float(reward)

    def _with_frame(self, env: gym.Env[Any, Any], seen: Seen) -> Seen:
        """What one environment shows, with a frame where they are drawn."""
        return replace(seen, frames=self._frame(env)[None]) if self._shows else seen

    def _frame(self, env: gym.Env[Any, Any]) -> Bytes:
        frame = np.asarray(env.render())
        if frame.dtype != np.uint8 or frame.ndim != 3:
            raise EnvironmentFault(f"drew a frame of {frame.dtype} {list(frame.shape)}, not uint8 [H, W, 3]")
        self._frame_shape = (frame.shape[2], *frame.shape[:2])
        return np.ascontiguousarray(frame.transpose(2, 0, 1))

    def _blank(self) -> Seen:
        """What an episode shows that could not begin. Raises EnvironmentFault if frames are drawn and none has begun
        so far, so that their size is unknown."""
        seen = self._spaces.nothing(1)
        if not self._shows:
            return seen
        if self._frame_shape is None:
            raise EnvironmentFault(f"no episode has begun: {next(lost for lost in self.lost if lost)}")
        return replace(seen, frames=np.zeros((1, *self._frame_shape), np.uint8))

    # By its batched class ---------------------------------------------------------------------------------------

    def _start_batched(self, seeds: Sequence[int]) -> bool:
        """Begin by the batched class. False if it starts episodes by itself, and so is not used."""
        num = len(seeds)
        if self._batched is None or self._batched.num_envs != num:
            if self._batched is not None:
                self._batched.close()
            made = gym.make_vec(self._spec, num, vectorization_mode="vector_entry_point", **self._options)
            if made.metadata.get("autoreset_mode") is not AutoresetMode.DISABLED:
                made.close()
                self._batched, self._has_class = None, False
                return False
            self._batched = made
        try:
            self._whole = self._reader.read(_reset(self._batched, list(seeds)), num)
        except Exception as error:  # noqa: BLE001 - of any environment; its episodes count as failed and say why
            self._whole = self._spaces.nothing(num)
            self._lose_all(error)
        return True

    def _lose_all(self, error: Exception) -> None:
        """Give up all episodes that the batched class plays, and the class's object."""
        num, reason = len(self.lost), f"{self.id}: {reason_of(error)}"
        self.lost = [reason] * num
        self._last, self._envs = [self._whole.select([row]) for row in range(num)], [None] * num
        broken, self._batched = self._batched, None
        _close_broken(broken, self.id)

    def _play_batched(self, rows: NDArray[np.int64], moves: Floats) -> Played:
        batched, count = self._batched, len(self.lost)
        assert batched is not None  # noqa: S101 - who calls has asked
        whole = np.zeros((count, *moves.shape[1:]), np.float32)
        whole[rows] = moves
        is_asked = np.zeros(count, np.bool_)
        is_asked[rows] = True
        inner = batched.unwrapped
        is_whole = isinstance(inner, PlaysChunks)
        try:
            played = self._chunk(inner, whole, is_asked) if is_whole else self._steps(whole, is_asked)
        except Exception as error:  # noqa: BLE001 - as above
            self._lose_all(error)
            return self.play(rows.tolist(), moves)
        self._whole, rewards, made, terminated, truncated, successes = played
        wrong = is_asked & ~np.isfinite(rewards)
        for row in wrong.nonzero()[0]:
            self.lost[row] = f"{self.id}: a reward of {rewards[row]} is not finite"
        self._num_moves += made
        if self._max_moves is not None:
            truncated = truncated | (is_asked & ~terminated & (self._num_moves >= self._max_moves))
        return Played(
            seen=self._whole.select(rows),
            rewards=np.where(wrong, 0.0, rewards)[rows],
            num_moves=made[rows],
            terminated=terminated[rows],
            truncated=truncated[rows],
            successes=successes[rows],
            errors=[self.lost[row] for row in rows],
        )

    def _chunk(self, inner: PlaysChunks, moves: Floats, is_asked: Bools) -> tuple[Any, ...]:
        height = moves.shape[1]
        if self._max_moves is not None:
            height = min(height, self._max_moves - int(self._num_moves[is_asked].max()))
        actions = np.stack([self._actions(moves[:, each]) for each in range(height)], axis=1)
        observation, rewards, terminated, truncated, info = inner.play_chunk(actions, is_asked)
        successes = _successes(info, len(rewards))
        seen = self._reader.read(observation, len(rewards))
        return seen, np.asarray(rewards, np.float64), info["num_moves"], terminated, truncated, successes

    def _steps(self, moves: Floats, is_asked: Bools) -> tuple[Any, ...]:
        """Move by move. Rows that rest are started anew after their end, since others may not step before that; what
        they show is kept from the end."""
        batched, count = self._batched, len(is_asked)
        assert batched is not None  # noqa: S101 - who calls has asked
        rewards, made = np.zeros(count), np.zeros(count, np.int64)
        terminated, truncated = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        successes, live = np.full(count, math.nan), is_asked.copy()
        seen: Seen | None = None
        for each in range(moves.shape[1]):
            observation, reward, ended, cut, info = batched.step(self._actions(moves[:, each]))
            now = self._reader.read(observation, count)
            seen = now if seen is None else _merged(live, now, seen)
            rewards[live] += np.asarray(reward, np.float64)[live]
            made[live] += 1
            terminated[live], truncated[live] = ended[live], (cut & ~ended)[live]
            successes = np.where(live, _successes(info, count), successes)
            limit = np.inf if self._max_moves is None else self._max_moves
            live &= ~(terminated | truncated | (self._num_moves + made >= limit))
            if (over := np.asarray(ended) | np.asarray(cut)).any():
                batched.reset(options={"reset_mask": over})
            if not live.any():
                break
        return seen, rewards, made, terminated, truncated, successes


def _reset(batched: VectorEnv[Any, Any, Any], seeds: Any) -> Any:  # Any: gymnasium types one seed alone
    return batched.reset(seed=seeds)[0]


def _spec(env_id: str) -> Any:
    """Raises ConfigError for an id that gymnasium does not know, or a module that cannot be imported."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        raise ConfigError(
            f"engine.environment.id = {env_id}: {as_sentence(error)} Give a registered id, or module:id, whose module "
            "registers it."
        ) from error


def _close_broken(env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | None, env_id: str) -> None:
    """Free what an environment holds that raised; what it then raises again is said and no more."""
    try:
        if env is not None:
            env.close()
    except Exception:
        logger.warning("%s could not be closed after it had raised", env_id, exc_info=True)


def _success(info: Mapping[str, Any], before: float) -> float:
    return next((float(info[name]) for name in SUCCESS if name in info), before)


def _successes(info: Mapping[str, Any], count: int) -> NDArray[np.float64]:
    """[B] of a batched info."""
    found = next((info[name] for name in SUCCESS if name in info), None)
    return np.full(count, math.nan) if found is None else np.asarray(found, np.float64)


def _with_axis(observation: Any) -> Any:
    if isinstance(observation, Mapping):
        return {key: np.asarray(value)[None] for key, value in observation.items()}
    return np.asarray(observation)[None]


def _merged(live: Bools, now: Seen, before: Seen) -> Seen:
    """What live rows show now, and what the others showed before."""

    def one(new: NDArray[Any] | None, old: NDArray[Any] | None) -> Any:
        if new is None or old is None:
            return None
        return np.where(live.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return Seen(one(now.images, before.images), one(now.states, before.states))
