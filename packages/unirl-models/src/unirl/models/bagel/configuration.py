"""The sizes of a BAGEL checkpoint, from its configurations and from the shapes in its files. No weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from unirl.models.loading import ModelFolder, fields_of
from unirl.models.packed.vision import VisionConfig
from unirl.models.packed.weights import tensor_shapes
from unirl.types.errors import CheckpointError

MODEL_FILE = "ema.safetensors"
VAE_FILE = "ae.safetensors"
LANGUAGE_CONFIG = "llm_config.json"
VISION_CONFIG = "vit_config.json"


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """The decoder, with two of each weight: for words, and for latents of images."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class VAEConfig:
    """The autoencoder. The defaults are FLUX.1's."""

    channels: int = 128
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    """Channels of each level, in units of `channels`; each level but the last halves the sides."""
    blocks: int = 2
    """Residual blocks of a level of the encoder; the decoder has one more."""
    latent_channels: int = 16
    groups: int = 32
    """Groups of the normalisations. No shape tells it: a checkpoint with another number has it in config.json, as
    `vae_config.groups`."""
    scale: float = 0.3611
    shift: float = 0.1159

    @property
    def factor(self) -> int:
        """Pixels per latent element on a side."""
        return 2 ** (len(self.multipliers) - 1)


@dataclass(frozen=True, kw_only=True)
class BagelConfig:
    """A whole model."""

    language: LanguageConfig
    vision: VisionConfig
    vae: VAEConfig
    max_latent_size: int
    """Rows, and columns, of the table of positions of latent tokens."""
    latent_patch: int = 2
    """Latent elements per token on a side."""

    @property
    def token_width(self) -> int:
        """Numbers of a latent token."""
        return self.latent_patch**2 * self.vae.latent_channels

    @property
    def pixels_per_token(self) -> int:
        """Pixels per token along a side of a generated image."""
        return self.latent_patch * self.vae.factor

    @classmethod
    def of_folder(cls, folder: ModelFolder) -> Self:
        """The sizes of a checkpoint in its published layout.

        The published code drops the last layer of the vision tower and enlarges the table of latent positions, so both
        are counted in the file. Raises CheckpointError if a file is missing or says less than is needed.
        """
        shapes, vae_shapes = file_shapes(folder.path / MODEL_FILE), file_shapes(folder.path / VAE_FILE)
        language, vision = folder.json(LANGUAGE_CONFIG), folder.json(VISION_CONFIG)
        try:
            return cls(
                language=fields_of(LanguageConfig, language, rope_theta=float(language.get("rope_theta", 1e6))),
                vision=fields_of(
                    VisionConfig,
                    {"num_channels": 3, "layer_norm_eps": 1e-6} | vision,
                    num_hidden_layers=_count(shapes, "vit_model.vision_model.encoder.layers."),
                    patches_per_side=math.isqrt(shapes["vit_pos_embed.pos_embed"][0]),
                ),
                vae=_vae_config(vae_shapes, folder.config.get("vae_config", {}).get("groups", VAEConfig.groups)),
                max_latent_size=math.isqrt(shapes["latent_pos_embed.pos_embed"][0]),
                latent_patch=folder.config.get("latent_patch_size", 2),
            )
        except KeyError as error:
            raise CheckpointError(
                f"{folder.path} is no complete BAGEL folder: {error} is neither in {LANGUAGE_CONFIG}, {VISION_CONFIG} "
                f"nor in {MODEL_FILE}, {VAE_FILE}. Fetch the folder again."
            ) from None


def file_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a safetensors file. Raises CheckpointError if it is missing or damaged."""
    if not path.is_file():
        there = sorted(entry.name for entry in path.parent.iterdir())[:8]
        raise CheckpointError(
            f"{path} is missing; the folder holds {there}. BAGEL's weights are {MODEL_FILE} and {VAE_FILE}, as "
            "published: fetch the folder again."
        )
    return tensor_shapes(path)


def _count(names: Mapping[str, Any], prefix: str) -> int:
    """Members of a list of modules, by the names of their weights."""
    found = {int(name.removeprefix(prefix).split(".")[0]) for name in names if name.startswith(prefix)}
    if not found:
        raise KeyError(prefix)
    return max(found) + 1


def _vae_config(shapes: Mapping[str, tuple[int, ...]], groups: int) -> VAEConfig:
    channels = shapes["encoder.conv_in.weight"][0]
    levels = _count(shapes, "encoder.down.")
    return VAEConfig(
        channels=channels,
        multipliers=tuple(
            shapes[f"encoder.down.{level}.block.0.conv1.weight"][0] // channels for level in range(levels)
        ),
        blocks=_count(shapes, "encoder.down.0.block."),
        latent_channels=shapes["decoder.conv_in.weight"][1],
        groups=groups,
    )
