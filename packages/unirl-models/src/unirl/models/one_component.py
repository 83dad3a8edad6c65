"""Bundles of which one module trains, whose LoRA is exported as peft writes it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from unirl.models.bundle import Bundle, LoRASettings
from unirl.models.causal_lm.peft_export import write_peft_adapter
from unirl.types.errors import ContractError


class OneComponentBundle(Bundle):
    """Base of such bundles."""

    component: ClassVar[str]
    """Name of the module that trains."""
    family: ClassVar[str]
    """Name for messages."""
    published_prefix: ClassVar[str] = ""
    """Beginning of the module's names in the published checkpoint."""
    task_type: ClassVar[str | None] = None
    """What peft calls the model's task."""
    pretrained_model: str

    @property
    @abstractmethod
    def trained_module(self) -> nn.Module:
        """The module that trains, whole or in part."""

    def trainable_modules(self) -> dict[str, nn.Module]:
        return {self.component: self.trained_module}

    def write_lora(self, folder: str, lora_state: Mapping[str, Mapping[str, Tensor]], settings: LoRASettings) -> None:
        """As peft does, by names of the published checkpoint, for `PeftModel.from_pretrained(model, folder)` and
        engines that load LoRA."""
        write_peft_adapter(
            folder, self.published(lora_state), settings, base=self.pretrained_model, task_type=self.task_type
        )

    def published(self, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of the one component by their published names. Raises ContractError if `state` has others."""
        if set(state) != {self.component}:
            raise ContractError(f"{self.family} trains one component, {self.component!r}; got {sorted(state)}")
        return {f"{self.published_prefix}{name}": tensor for name, tensor in state[self.component].items()}
