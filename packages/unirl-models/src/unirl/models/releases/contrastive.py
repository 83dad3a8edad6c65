"""Configurations of released models that embed texts and images in one space, which scorers compute with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.models.releases.configurations import CLIP_H_VISION, CLIP_L

Settings = Mapping[str, Any]  # Any: JSON values

_CLIP_VIT_L: Settings = {
    "text_config": CLIP_L,
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "projection_dim": 768,
}
_CLIP_VIT_H: Settings = {
    "text_config": {
        **CLIP_L,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "projection_dim": 1024,
        "hidden_act": "gelu",
    },
    "vision_config": CLIP_H_VISION,
    "projection_dim": 1024,
}
CLIP_MODELS: Mapping[str, Settings] = {
    "openai/clip-vit-large-patch14": _CLIP_VIT_L,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": _CLIP_VIT_H,
    "yuvalkirstain/PickScore_v1": _CLIP_VIT_H,
}
"""By repository: what a CLIPConfig says."""
