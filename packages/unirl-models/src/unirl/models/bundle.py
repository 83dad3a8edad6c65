"""What `trainer check` reads of every bundle. It imports no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unirl.types.errors import ContractError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LoRASettings:
    """What an adapter's files say of it besides its weights."""

    rank: int
    alpha: float
    target_modules: Sequence[str]


class Bundle:
    """Base of the bundles. A class that differs from a default sets the attribute to a literal."""

    recipe_rules: ClassVar[str] = "unirl.models.rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""
    reads_images_in_turns: ClassVar[bool] = False
    """True if messages between the model's turns may show images."""
    reads_media: ClassVar[bool] = False
    """True if the model is conditioned on images or videos of a request besides its text."""
    reads_audio: ClassVar[bool] = False
    """True if it hears the sound of a request besides its text."""
    needs_media: ClassVar[bool] = False
    """True if it makes nothing without them."""
    needs_mask: ClassVar[bool] = False
    """True if it fills a hole, which a prompt's mask says."""
    makes_sound: ClassVar[bool] = False
    """True if its videos have sound."""
    needed_videos: ClassVar[tuple[str, ...]] = ()
    """Roles of the videos that a prompt must bring."""
    most_images: ClassVar[int | None] = None
    """Images of a prompt that it takes, masks apart; None sets no limit."""
    draws_by_tokens: ClassVar[bool] = False
    """True if its samples are images that the model draws token by token, with guidance where it is asked for."""
    index_file: ClassVar[str] = "model_index.json"
    """What makes a folder one of this bundle's."""

    spreads_tokens: ClassVar[bool] = False
    """True if ranks can share its samples, each with a part of their tokens (`topology.sp`)."""
    cuts_layers: ClassVar[bool] = False
    """True if ranks can have its layers together, each a part of their weights (`topology.tp`)."""
    kept_whole: ClassVar[str] = ""
    """Why ranks can have neither, as an error says it; empty where there is no more to say."""
    spreads_experts: ClassVar[bool] = False
    """True if ranks can have its experts together (`topology.ep`)."""
    expert_layers: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of layers in its experts that LoRA cannot adapt."""

    def export_lora(
        self,
        folder: str,
        lora_state: Mapping[str, Mapping[str, Tensor]],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
    ) -> None:
        """Writes LoRA weights for the library that loads the model, see `write_lora`.

        lora_state: component -> state of peft's get_peft_model_state_dict, of every component that trains. Raises
        ContractError for other components, an empty state, a key that is no LoRA weight, or tensors of another rank.
        """
        self.write_lora(folder, lora_state, LoRASettings(rank, alpha, target_modules))

    def write_lora(self, folder: str, lora_state: Mapping[str, Mapping[str, Tensor]], settings: LoRASettings) -> None:
        """Writes the files of an adapter into `folder`. Raises ContractError for a bundle that has none."""
        raise ContractError(f"{type(self).__name__} does not say how an adapter is written. Define write_lora there.")
