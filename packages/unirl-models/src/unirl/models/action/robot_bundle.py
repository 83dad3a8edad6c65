"""What bundles of large policies that act have in common."""

from __future__ import annotations

from collections.abc import Collection
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
    robot: Robot
    network: nn.Module
    _linear_layers: tuple[str, ...] = ()

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

    @property
    def lora_target_modules(self) -> tuple[str, ...]:
        """Names of the linear layers that train. Without adapters these would train whole, with them only the adapters
        do."""
        return self._linear_layers

    def _note_linear_layers(self, kept: Collection[str] = ()) -> None:
        """Remember the layers that train, before adapters freeze them. kept: names of those without adapters."""
        self._linear_layers = tuple(
            name
            for name, layer in self.network.named_modules()
            if isinstance(layer, nn.Linear) and layer.weight.requires_grad and name not in kept
        )

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The whole model, of which parts may be frozen."""
        return {self.component: self.network}
