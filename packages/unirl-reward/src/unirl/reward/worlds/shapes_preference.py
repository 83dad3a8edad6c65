"""Which of two images of the shapes world shows its prompt better, as a judge that only compares would say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from unirl.reward.worlds.shapes import score_shapes


def better_shapes(
    first: Tensor,
    second: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],  # Any: rows of a data file
) -> Tensor:
    """1 where the first image has the higher strict + soft of the verifier, 0 where the second has, 1/2 for a tie.

    first, second: [p, 3, H, W] in [0, 1]. Returns float32 [p] on the CPU, for `PairwiseFunctionScorer`; how much better
    an image is remains unsaid. Raises ValueError for a prompt outside the grammar. Needs the extra `shapes`.
    """
    (strict_first, soft_first), (strict_second, soft_second) = (score_shapes(each, prompts) for each in (first, second))
    return ((strict_first + soft_first - strict_second - soft_second).sign() + 1) / 2
