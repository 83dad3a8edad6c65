"""Fine-tuning on the policy's own weighted completions: maximum likelihood, without ratio, clip or baseline.

Which method it is lies in the weights (`unirl.algorithms.sample_weights`): reward-weighted regression, RAFT (best of N)
or rejection fine-tuning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics
from unirl.algorithms.sample_weights import require_weights
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows


class ARFineTuning(TokenAlgorithm):
    """-w log p for every token of a completion of weight w >= 0.

    Everything else: see `TokenAlgorithm`; no ratio enters the loss, so `importance_level` changes metrics alone.
    """

    takes_stale_samples: ClassVar[bool] = True
    requires_weights: ClassVar[bool] = True

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """See `TokenAlgorithm.losses`. Raises ConfigError for weights below 0."""
        require_weights(micro.advantages, type(self).__name__)
        yield from super().losses(micro)

    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """The weighted negative log-likelihood."""
        return -rows.advantage_M * rows.logp_M, RowMetrics()
