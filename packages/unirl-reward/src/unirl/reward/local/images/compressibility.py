"""How well an image compresses as JPEG.

Source: DDPO (arXiv 2305.13301), section 4.1: the size of the image as JPEG of quality 95, in kB.
"""

from __future__ import annotations

from io import BytesIO
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.reward.card import Normalisation, ScorerCard
from unirl.reward.local.pixels import to_pictures
from unirl.types.bounds import Bounds, PositiveInt, bounded
from unirl.types.reward import RewardRequest

BYTES_PER_KB = 1000
"""The paper's kB."""


def jpeg_kilobytes(pixels_bCHW: Tensor, quality: int = 95) -> Tensor:
    """Size of each image as JPEG, kB of 1000 bytes; float32 [b]. Raises ContractError as `to_pictures` does."""
    sizes = []
    for picture in to_pictures(pixels_bCHW):
        buffer = BytesIO()
        picture.save(buffer, format="JPEG", quality=quality)
        sizes.append(buffer.tell() / BYTES_PER_KB)
    return torch.tensor(sizes, dtype=torch.float32)


@bounded("scorer")
class JPEGIncompressibilityScorer(LocalScorer):
    """Size of the JPEG in kB: detail is rewarded. Runs on the CPU.

    normalise: divided by 500, as Flow-GRPO (arXiv 2505.05470) does.
    """

    reads_prompt: ClassVar[bool] = False
    card = ScorerCard(
        name="jpeg_incompressibility",
        summary="the size of the JPEG: detail",
        media=("image",),
        low=0,
        typical="kB of 1000 bytes",
        normalisation=Normalisation(500),
        source="DDPO, arXiv 2305.13301",
    )

    def __init__(
        self,
        *,
        quality: Annotated[int, Bounds(ge=1, le=100)] = 95,
        normalise: bool = False,
        name: str = "jpeg_incompressibility",
        batch_size: PositiveInt = 64,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, normalise=normalise)
        self.quality = quality

    def score_batch(self, request: RewardRequest) -> Tensor:
        """kB, float32 [b]."""
        return jpeg_kilobytes(request.pixels, self.quality)


@bounded("scorer")
class JPEGCompressibilityScorer(LocalScorer):
    """Minus the size of the JPEG in kB: smoothness is rewarded. Runs on the CPU.

    normalise: divided by 500, as Flow-GRPO (arXiv 2505.05470) does.
    """

    reads_prompt: ClassVar[bool] = False
    card = ScorerCard(
        name="jpeg_compressibility",
        summary="minus the size of the JPEG: smoothness",
        media=("image",),
        high=0,
        typical="-kB of 1000 bytes",
        normalisation=Normalisation(500),
        source="DDPO, arXiv 2305.13301",
    )

    def __init__(
        self,
        *,
        quality: Annotated[int, Bounds(ge=1, le=100)] = 95,
        normalise: bool = False,
        name: str = "jpeg_compressibility",
        batch_size: PositiveInt = 64,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, normalise=normalise)
        self.quality = quality

    def score_batch(self, request: RewardRequest) -> Tensor:
        """Minus kB, float32 [b]."""
        return -jpeg_kilobytes(request.pixels, self.quality)
