"""A reward: one number per sample, the higher the better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def my_reward(
    images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, object]], target: float = 0.8
) -> Tensor:
    """Higher the nearer the mean pixel is to `target`.

    images: [b, 3, H, W] in [0, 1]; videos come as a list of [T, 3, H, W], texts as a list of strings. prompts: b.
    metadata: the b rows of the data file. Returns [b]; NaN for a sample that cannot be scored.
    """
    return -(images.mean(dim=(1, 2, 3)) - target).abs()
