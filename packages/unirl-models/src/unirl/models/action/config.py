"""The shape of a policy that acts, as its config.json holds it. Imports no torch: `trainer check` reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import CheckpointError, ConfigError, as_sentence

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
MODEL_TYPE = "unirl_action"
Head = Literal["flow", "bins"]


@bounded("bundle.config")
@dataclass(frozen=True, kw_only=True)
class ActionConfig:
    """What a policy sees and draws.

    head: flow draws a chunk by flow matching, bins one of `num_bins` tokens for each of its numbers.
    chunk: moves that are drawn at once. action_size: numbers of a move. image_shape: [C, H, W] of the images that it
    sees. state_size: numbers of the states that it reads. state_offset, state_scale: [state_size], it reads
    (state - offset) / scale; empty: states as they are. width: of what it makes of an observation.
    num_keypoints: places that it looks for in an image. noise_range: smallest and largest standard deviation of a
    flow's steps, which a small network chooses for each number; None: no such network.
    Raises ConfigError if it would see nothing, for images that are too small, a state_offset or state_scale of another
    length, a scale of 0, and a noise_range that no head has.
    """

    head: Head
    action_size: PositiveInt
    chunk: PositiveInt = 1
    image_shape: tuple[int, int, int] | None = None
    state_size: PositiveInt | None = None
    state_offset: tuple[float, ...] = ()
    state_scale: tuple[float, ...] = ()
    width: PositiveInt = 128
    num_keypoints: PositiveInt = 32
    num_bins: PositiveInt = 256
    noise_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.image_shape is not None:
            # JSON and YAML know lists only.
            object.__setattr__(self, "image_shape", tuple(self.image_shape))
            if len(self.image_shape) != 3 or min(self.image_shape[1:]) < 16 or self.image_shape[0] < 1:
                raise ConfigError(
                    f"bundle.config.image_shape = {list(self.image_shape)} must be [C, H, W] with sides of at least 16."
                )
        for name in ("state_offset", "state_scale"):
            values = tuple(float(value) for value in getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) not in (0, self.state_size or 0):
                raise ConfigError(
                    f"bundle.config.{name} has {len(values)} numbers, state_size is {self.state_size}. Give one for "
                    "each number of a state, or none."
                )
        if 0 in self.state_scale:
            raise ConfigError(f"bundle.config.state_scale = {list(self.state_scale)} must not be 0.")
        if self.noise_range is not None:
            object.__setattr__(self, "noise_range", tuple(self.noise_range))
            check_noise_range(self.noise_range, self.head)
        if self.image_shape is None and self.state_size is None:
            raise ConfigError("bundle.config: set image_shape, state_size or both; a policy must see something.")

    def with_noise(self, noise_range: tuple[float, float] | None) -> Self:
        """The same with deviations in `noise_range`; as it is for None."""
        return self if noise_range is None else dataclasses.replace(self, noise_range=noise_range)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The configuration of a checkpoint. Raises CheckpointError if there is none of a policy that acts."""
        path = folder / CONFIG_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {as_sentence(error)} Give a folder of an ActionBundle."
            ) from error
        if not isinstance(values, Mapping) or values.get("model_type") != MODEL_TYPE:
            raise CheckpointError(f"{path} is of no policy that acts (model_type: {MODEL_TYPE}).")
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def as_json(self) -> str:
        """The content of a config.json."""
        values: dict[str, Any] = {"model_type": MODEL_TYPE, **dataclasses.asdict(self)}
        return json.dumps(values, indent=2) + "\n"


def check_noise_range(noise_range: Sequence[float], head: Head) -> None:
    """Raise ConfigError unless these are two deviations, and the head is a flow."""
    if head != "flow":
        raise ConfigError(f"noise_range = {list(noise_range)}: the head {head} takes no noisy steps. Remove it.")
    if len(noise_range) != 2 or not 0 < noise_range[0] < noise_range[1]:
        raise ConfigError(
            f"noise_range = {list(noise_range)} must be the smallest and the largest standard deviation, above 0."
        )
