"""A reward of the shapes world that reads latents, so that nothing is decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def smoothness(
    latents: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],  # Any: rows of a data file
) -> Tensor:
    """Minus the mean square of the differences between neighbours, along both axes of the image; 0 where all are equal.

    latents: [b, C, H, W]. Returns [b]. For `FunctionRewardScorer` with `latents: true`; it ignores the prompt.
    """
    across, down = latents.diff(dim=-1), latents.diff(dim=-2)
    return -(across.square().mean(dim=(1, 2, 3)) + down.square().mean(dim=(1, 2, 3)))
