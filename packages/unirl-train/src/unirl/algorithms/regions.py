"""Weights of the places of a medium, from how much attention each got.

Legend: B samples, R rows; maps of f latent frames of h w places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.types.errors import ConfigError, ContractError


def region_weights(maps_B: Tensor, most: float) -> Tensor:
    """Weight of each place, [B, f, h, w] in [1, most], from the attention that it got: with z its deviation from the
    mean of its frame, in standard deviations of the frame, and s = most - 1,

        w = 1 + s sigmoid(s z)

    maps_B: float32 [B, f, h, w], on any scale. most = 1 gives ones. Raises ConfigError for frames of one place.
    Source: the authors' code of OmniNFT (arXiv 2605.12480).
    """
    if maps_B.shape[2] * maps_B.shape[3] < 2:
        raise ConfigError(
            f"maps {tuple(maps_B.shape)} have frames of one place, and no place of it weighs more than another. Set "
            "algorithm.region_weight: 1, or sample larger videos."
        )
    places = maps_B.flatten(2)
    deviation = places - places.mean(dim=2, keepdim=True)
    z = deviation / places.std(dim=2, keepdim=True).clamp(min=1e-8)
    span = most - 1.0
    return (1.0 + span * torch.sigmoid(span * z)).view_as(maps_B)


def element_weights(weights_R: Tensor, x0: Tensor) -> Tensor:
    """The weights of places as factors of the elements of a medium's slice, shaped as it, with mean 1 in each row.

    weights_R: [R, f, h, w]. x0: [R, ...], some such maps per row, channel after channel. sum(w error) / sum(w) is then
    the mean over elements of the factor times the error. Ones stay ones to the last bit.
    """
    places = weights_R.flatten(1)
    channels, rest = divmod(x0[0].numel(), places.shape[1])
    if rest:
        raise ContractError(f"a slice {tuple(x0.shape)} is no number of maps {tuple(weights_R.shape[1:])}")
    return (places / places.mean(dim=1, keepdim=True)).repeat(1, channels).view_as(x0)
