"""The robot that a large policy moves: sizes of what it sees and does, and its units. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError


@bounded("bundle.robot")
@dataclass(frozen=True, kw_only=True)
class Robot:
    """What an environment shows and takes, and how a policy's numbers become its own.

    image_shape: [C, H, W] of the images of the environment, which are resized to those of the policy. state_size:
        numbers of its states; None: it shows none, and the policy reads zeros. action_size: numbers of a move.
    chunk: moves of a chunk that are executed before the next decision, at most those that the policy draws.
    action_offset, action_scale: [action_size], move = offset + scale * number, in the environment's moves of [-1, 1].
        Of a policy with means and deviations these are they; of one with quantiles half of q99 + q01 and of q99 - q01.
    state_offset, state_scale: [state_size], number = (state - offset) / scale.
    No default: a checkpoint says its own, and other units make other moves.
    Raises ConfigError for lists of other lengths, and scales of 0.
    """

    image_shape: tuple[int, int, int]
    action_size: PositiveInt
    chunk: PositiveInt
    action_offset: Sequence[float]
    action_scale: Sequence[float]
    state_size: PositiveInt | None = None
    state_offset: Sequence[float] = ()
    state_scale: Sequence[float] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_shape", tuple(self.image_shape))
        if len(self.image_shape) != 3 or self.image_shape[0] != 3 or min(self.image_shape) < 1:
            raise ConfigError(f"bundle.robot.image_shape = {list(self.image_shape)} must be [3, H, W].")
        for name, length in (("action", self.action_size), ("state", self.state_size or 0)):
            for part in ("offset", "scale"):
                values = [float(value) for value in getattr(self, f"{name}_{part}")]
                object.__setattr__(self, f"{name}_{part}", tuple(values))
                if len(values) != length:
                    raise ConfigError(
                        f"bundle.robot.{name}_{part} has {len(values)} numbers, {name}_size is {length}. Give one for "
                        "each, from the statistics of the checkpoint."
                    )
                if part == "scale" and 0 in values:
                    raise ConfigError(f"bundle.robot.{name}_scale = {values} must not be 0.")
