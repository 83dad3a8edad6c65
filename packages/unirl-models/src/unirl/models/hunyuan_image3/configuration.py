"""The sizes of a HunyuanImage3 checkpoint, from its configuration. No weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from unirl.models.loading import ModelFolder, fields_of
from unirl.models.packed.vision import VisionConfig
from unirl.types.errors import CheckpointError, ConfigError

EXPECTED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "use_qk_norm": True,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "norm_topk_prob": True,
    "moe_drop_tokens": False,
    "moe_layer_num_skipped": 0,
    "patch_size": 1,
    "img_proj_type": "unet",
    "cond_image_type": "vae_vit",
    "cond_token_attn_type": "joint_full",
    "cfg_distilled": False,
    "use_meanflow": False,
}
"""What of `config.json` these modules are written for; a name that is not there counts as the value here."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The mixture of experts of a block."""

    expert_width: int
    """Inner width of each routed expert."""
    shared_width: int
    """Inner width of the expert that every token goes through."""
    top_k: int
    """Routed experts of a token."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The transformer."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]

    @property
    def group_size(self) -> int:
        """Query heads per head of keys and values."""
        return self.num_attention_heads // self.num_key_value_heads


@dataclass(frozen=True, kw_only=True)
class VAEConfig:
    """The autoencoder, whose convolutions know frames; an image is one latent frame."""

    channels: tuple[int, ...]
    """Channels per level of the encoder; each level but the last changes the size."""
    blocks: int
    """Residual blocks of a level of the encoder; the decoder has one more."""
    latent_channels: int
    factor: int
    """Pixels per latent element on a side."""
    temporal_factor: int
    """Frames per latent frame."""
    scale: float
    shift: float
    groups: int = 32

    @property
    def num_halvings(self) -> int:
        """Levels that halve the sides."""
        return int(math.log2(self.factor))

    @property
    def num_temporal_halvings(self) -> int:
        """The last so many of them halve the frames too."""
        return int(math.log2(self.temporal_factor))


@dataclass(frozen=True, kw_only=True)
class HunyuanImage3Config:
    """A whole model."""

    decoder: DecoderConfig
    vision: VisionConfig
    vae: VAEConfig
    patch_width: int
    """Channels between latents and tokens."""
    base_size: int
    """Pixels on the side of a square image; sizes of images are counted from it."""
    most_patches: int
    """Most patches of an image for the vision tower; a smaller one is padded to so many tokens."""

    @classmethod
    def of_folder(cls, folder: ModelFolder) -> Self:
        """The sizes of a checkpoint in its published layout.

        Raises CheckpointError if the configuration lacks a needed value, ConfigError if it is of an unsupported variant
        (such as a distilled checkpoint, whose guidance is an input).
        """
        raw = folder.config
        other = {name: raw[name] for name, value in EXPECTED.items() if name in raw and raw[name] not in (value, None)}
        if other:
            raise ConfigError(
                f"{folder.path}: config.json says {other}; this bundle is written for "
                f"{ {name: EXPECTED[name] for name in other} }. Use tencent/HunyuanImage-3.0 or -3.0-Instruct."
            )
        try:
            return cls(
                decoder=_decoder(raw),
                vision=fields_of(VisionConfig, raw["vit"], patches_per_side=math.isqrt(raw["vit"]["num_patches"])),
                vae=_vae(raw["vae"]),
                patch_width=raw["patch_embed_hidden_dim"],
                base_size=raw["image_base_size"],
                most_patches=raw["vit_processor"]["max_num_patches"],
            )
        except KeyError as error:
            raise CheckpointError(
                f"{folder.path}/config.json has no {error}, so it is no complete HunyuanImage3. Fetch the folder again."
            ) from None


def _decoder(raw: Mapping[str, Any]) -> DecoderConfig:
    count = raw["num_hidden_layers"]
    inner, shared, top_k = (
        _per_layer(raw[name], count) for name in ("moe_intermediate_size", "num_shared_expert", "moe_topk")
    )
    return fields_of(
        DecoderConfig,
        raw,
        head_dim=raw["attention_head_dim"],
        rope_theta=float(raw["rope_theta"]),
        layers=tuple(
            LayerConfig(expert_width=width, shared_width=raw["intermediate_size"] * num_shared, top_k=k)
            for width, num_shared, k in zip(inner, shared, top_k, strict=True)
        ),
    )


def _vae(raw: Mapping[str, Any]) -> VAEConfig:
    return VAEConfig(
        channels=tuple(raw["block_out_channels"]),
        blocks=raw["layers_per_block"],
        latent_channels=raw["latent_channels"],
        factor=raw["ffactor_spatial"],
        temporal_factor=raw["ffactor_temporal"],
        scale=raw["scaling_factor"] or 1.0,
        shift=raw.get("shift_factor") or 0.0,
    )


def _per_layer(value: int | list[int], count: int) -> list[int]:
    return value[:count] if isinstance(value, list) else [value] * count
