"""What a pipeline folder is made of: each component's class, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Role(Enum):
    """What a component is for. It decides precision, device and whether it can train."""

    TRAINED = "trained"
    """A transformer or U-Net, in `dtype`."""
    AUTOENCODER = "autoencoder"
    """Between latents and media, in `vae_dtype`, frozen."""
    TEXT = "text"
    """A text encoder, in `text_encoder_dtype`, frozen, freed once every prompt is encoded."""
    FROZEN = "frozen"
    """Another model, in `dtype`, frozen."""
    PROCESSOR = "processor"
    """A tokenizer, image or feature processor: no weights; of the class that the index names."""


@dataclass(frozen=True)
class Component:
    """One entry of `model_index.json`."""

    role: Role
    model_class: type[Any] | None = None  # Any: models of diffusers and transformers, which share no base class
    """Loads the weights; None for a processor."""
    is_optional: bool = False
    """True if a folder of the family may leave it out."""
    aliases: tuple[str, ...] = ()
    """Other classes that an index may name, of whose weights `model_class` reads its part."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes that the index may name."""
        return (*(() if self.model_class is None else (self.model_class.__name__,)), *self.aliases)


def trained(model_class: type[Any], *, is_optional: bool = False) -> Component:
    """A model that trains, if the recipe does not name others."""
    return Component(Role.TRAINED, model_class, is_optional)


def autoencoder(model_class: type[Any], *, is_optional: bool = False) -> Component:
    """A VAE."""
    return Component(Role.AUTOENCODER, model_class, is_optional)


def text_encoder(model_class: type[Any], *aliases: str, is_optional: bool = False) -> Component:
    """A text encoder."""
    return Component(Role.TEXT, model_class, is_optional, aliases)


def frozen(model_class: type[Any], *aliases: str, is_optional: bool = False) -> Component:
    """A model that is used and never trains, such as an image encoder."""
    return Component(Role.FROZEN, model_class, is_optional, aliases)


def processor(*, is_optional: bool = False) -> Component:
    """A tokenizer or image processor."""
    return Component(Role.PROCESSOR, None, is_optional)
