"""Many episodes of one environment at once, as policies that act play them: chunks of moves in, observations out.

NumPy on both sides. Moves are in [-1, 1] whatever the environment takes, and an episode that has ended rests until the
next start. Legend: B episodes, b of them asked for, C H W image, S numbers of a state, H moves of a chunk, D numbers of
a move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from unirl.types.errors import ConfigError, UniRLError
from unirl.types.protocols.hosting import HostingPool

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class EnvironmentFault(UniRLError, RuntimeError):
    """An environment raised, died, hung, or gave what is no observation or reward of its space."""


@dataclass(frozen=True)
class Spaces:
    """What a policy sees of an environment, and what it gives."""

    action_size: int
    """D."""
    image_shape: tuple[int, int, int] | None = None
    """C, H and W; None without images."""
    state_size: int | None = None
    """S; None without a state."""
    moves_per_second: float = 10.0
    """For videos."""

    def nothing(self, num: int) -> Seen:
        """What `num` episodes show that could not begin: black images, states of zeros."""
        return Seen(
            None if self.image_shape is None else np.zeros((num, *self.image_shape), np.uint8),
            None if self.state_size is None else np.zeros((num, self.state_size), np.float32),
        )


@dataclass(frozen=True)
class Seen:
    """What b episodes show."""

    images: Bytes | None = None
    """[b, C, H, W]."""
    states: Floats | None = None
    """[b, S]."""
    frames: Bytes | None = None
    """[b, 3, H, W], for people; None: `images`, where there are any."""

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """What the episodes of all parts show, in their order."""

        def joined(values: Sequence[NDArray[Any] | None]) -> Any:
            present = [value for value in values if value is not None]
            return np.concatenate(present) if present else None

        return cls(
            joined([part.images for part in parts]),
            joined([part.states for part in parts]),
            joined([part.frames for part in parts]),
        )

    def select(self, rows: Sequence[int] | NDArray[np.int64]) -> Seen:
        """What the episodes at places `rows` show."""
        at = np.asarray(rows, np.int64)
        return Seen(
            None if self.images is None else self.images[at],
            None if self.states is None else self.states[at],
            None if self.frames is None else self.frames[at],
        )

    def blank(self) -> Self:
        """As many episodes that show nothing: zeros of the same shapes."""

        def zeros(part: NDArray[Any] | None) -> Any:
            return None if part is None else np.zeros_like(part)

        return type(self)(zeros(self.images), zeros(self.states), zeros(self.frames))

    def to_show(self) -> Bytes | None:
        """Frames, else images; None where there is nothing to look at."""
        return self.images if self.frames is None else self.frames


@dataclass(frozen=True)
class Played:
    """What came of a chunk in b episodes."""

    seen: Seen
    """After the last executed move."""
    rewards: NDArray[np.float64]
    """[b], summed over the executed moves."""
    num_moves: NDArray[np.int64]
    """[b] executed moves: H, or fewer where the episode ended."""
    terminated: Bools
    """[b], whether the environment ended the episode."""
    truncated: Bools
    """[b], whether a limit did."""
    successes: NDArray[np.float64]
    """[b] 1 or 0 of an environment that says what success is, NaN of others."""
    errors: Sequence[str | None]
    """[b] why the environment of an episode is lost, which ends it; None where it is not."""


class VectorEnvironment(ABC):
    """Plays episodes side by side. A recipe names its class at `engine.environment`."""

    action_size: ClassVar[int | None] = None
    """D where the class knows it, for `trainer check`; so are the two below."""
    image_shape: ClassVar[tuple[int, int, int] | None] = None
    state_size: ClassVar[int | None] = None
    is_gymnasium: ClassVar[bool] = False
    """True if it makes what `id` names by gymnasium."""

    def play_in(self, pool: HostingPool) -> None:
        """Let the processes of a pool of kind env play, which the recipe names in a keyword `pool`. Raises ConfigError
        if the class plays in no pool."""
        raise ConfigError(f"{type(self).__name__} plays in no pool ({pool.name}). Take GymnasiumProcesses.")

    @property
    @abstractmethod
    def spaces(self) -> Spaces:
        """Sizes of observations and moves."""

    @abstractmethod
    def start(self, seeds: Sequence[int]) -> Seen:
        """Begin B episodes, one for each seed; those before are over. The same seed gives the same start.

        One that cannot begin shows zeros, and its first `play` says why it is lost.
        """

    @abstractmethod
    def play(self, rows: Sequence[int], moves: Floats) -> Played:
        """Make the moves [b, H, D] in the episodes `rows`, each until it ends. None of them has ended."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds. Safe to call twice."""


def checked(name: str, value: Any, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """A part of an observation as an array of `dtype`. Raises EnvironmentFault for another shape or kind, and for
    numbers that are not finite."""
    found = np.asarray(value)
    if found.shape != shape:
        raise EnvironmentFault(f"{name} has the shape {list(found.shape)}, its space says {list(shape)}")
    if dtype is np.uint8 and found.dtype != np.uint8:
        raise EnvironmentFault(f"{name} is {found.dtype}, its space says uint8")
    if not np.issubdtype(found.dtype, np.number):
        raise EnvironmentFault(f"{name} is {found.dtype}, which is no number")
    if not np.issubdtype(found.dtype, np.integer) and not np.isfinite(found).all():
        raise EnvironmentFault(f"{name} holds numbers that are not finite")
    return found.astype(dtype, copy=False)
