"""What bundles of large policies that act have in common."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from unirl.models.action.robot import Robot
from unirl.models.bundle import Bundle
from unirl.models.loading import CONFIG_FILE

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
"""Files of a released folder that an export writes anew."""


class RobotBundle(Bundle):
    """A policy of a released folder that moves a robot. A subclass sets `robot` and `network`."""

    recipe_rules: ClassVar[str] = "unirl.models.action.large_rules"
    index_file: ClassVar[str] = CONFIG_FILE
    component: ClassVar[str] = "policy"
    lora_target_modules: tuple[str, ...] = ()

    robot: Robot
    network: nn.Module

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """Moves that are executed of a chunk, and numbers of a move."""
        return self.robot.chunk, self.robot.action_size

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """[C, H, W] of the environment's images."""
        return self.robot.image_shape

    @property
    def state_size(self) -> int | None:
        """Numbers of the environment's states; None: it reads none."""
        return self.robot.state_size

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The whole model, of which parts may be frozen."""
        return {self.component: self.network}
