"""The shape of an OpenVLA, as its config.json holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.types.errors import ConfigError

NUM_TOKENS = 256
"""Tokens of a number, the last ones of the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """A vision transformer in timm's layout."""

    width: int
    depth: int
    heads: int
    hidden: int
    """Width inside a perceptron."""
    patch: int = 14
    registers: int = 0
    has_class: bool = False
    """True if it has a token of the class, and scales each branch (DINOv2)."""


TIMM: Mapping[str, TowerShape] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerShape(
        width=1024, depth=24, heads=16, hidden=4096, registers=4, has_class=True
    ),
    "vit_so400m_patch14_siglip_224": TowerShape(width=1152, depth=27, heads=16, hidden=4304),
}
"""By timm's names, which the released config.json gives."""


@dataclass(frozen=True, kw_only=True)
class OpenVLAShape:
    """What is built."""

    text: Mapping[str, Any]  # Any: the values of a LlamaConfig
    towers: tuple[TowerShape, TowerShape]
    """DINOv2, then SigLIP."""
    image_side: int
    first_token: int
    """Id of the first of the tokens of numbers."""

    @classmethod
    def read(cls, config: Mapping[str, Any], source: object) -> OpenVLAShape:
        """The shape in a config.json, at `source`, which may list `towers` by their sizes instead of naming timm's.

        Raises ConfigError for an OpenVLA of another kind than the released one of 7 billion parameters.
        """
        text, names = config.get("text_config") or {}, config.get("timm_model_ids") or []
        sides: Sequence[int] = config.get("image_sizes") or [224, 224]
        if "towers" in config:
            towers = [TowerShape(**each) for each in config["towers"]]
        else:
            towers = [TIMM[name] for name in names if name in TIMM]
        if config.get("model_type") != "openvla" or text.get("model_type") != "llama" or len(towers) != 2:
            raise ConfigError(
                f"{source}: model_type {config.get('model_type')!r}, text_config.model_type {text.get('model_type')!r} "
                f"and timm_model_ids {names}; this bundle loads openvla on a llama with {' and '.join(TIMM)}."
            )
        if config.get("n_action_bins", NUM_TOKENS) != NUM_TOKENS or len(set(sides)) != 1:
            raise ConfigError(
                f"{source}: n_action_bins = {config.get('n_action_bins')} and image_sizes = {list(sides)}; this bundle "
                f"has {NUM_TOKENS} bins, and images of one size for both towers."
            )
        words = int(text["vocab_size"]) - int(config.get("pad_to_multiple_of", 64))
        return cls(text=text, towers=(towers[0], towers[1]), image_side=int(sides[0]), first_token=words - NUM_TOKENS)
