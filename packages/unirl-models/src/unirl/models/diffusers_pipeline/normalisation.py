"""Latents as a VAE makes them, and as a transformer is trained on them.

Two rules: (x - shift) scale with one number for all channels, or (x - mean) / std with one per channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def scaled(latents: Tensor, config: Mapping[str, Any]) -> Tensor:  # Any: a component's JSON values
    """(x - shift_factor) scaling_factor."""
    return (latents - (config.get("shift_factor") or 0.0)) * config["scaling_factor"]


def unscaled(latents: Tensor, config: Mapping[str, Any]) -> Tensor:  # Any: as above
    """The inverse of `scaled`."""
    return latents / config["scaling_factor"] + (config.get("shift_factor") or 0.0)


def standardised(latents: Tensor, config: Mapping[str, Any]) -> Tensor:  # Any: as above
    """(x - latents_mean) / latents_std, channel by channel; latents [B, C, ...]."""
    mean, std = channel_moments(latents, config)
    return (latents - mean) / std


def unstandardised(latents: Tensor, config: Mapping[str, Any]) -> Tensor:  # Any: as above
    """The inverse of `standardised`."""
    mean, std = channel_moments(latents, config)
    return latents * std + mean


def channel_moments(latents: Tensor, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:  # Any: as above
    """`latents_mean` and `latents_std`, each [1, C, ...], to be applied to latents [B, C, ...]."""
    shape = (1, -1, *(1 for _ in latents.shape[2:]))
    mean, std = (torch.tensor(config[name]).view(shape).to(latents) for name in ("latents_mean", "latents_std"))
    return mean, std
