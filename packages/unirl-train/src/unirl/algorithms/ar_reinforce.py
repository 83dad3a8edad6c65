"""REINFORCE: the score function of the policy that sampled. With `advantages.preset: rloo` it is RLOO as published.

Sources: Williams 1992; Ahmadian et al. 2024 (arXiv 2402.14740).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows
from unirl.types.errors import ContractError


class ARReinforce(TokenAlgorithm):
    """-A log p for every token. Its samples serve one update, then they are another policy's.

    `old_logp_source: rollout` saves an anchor that only metrics would use. Everything else: see `TokenAlgorithm`.
    """

    is_on_policy: ClassVar[bool] = True

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """See `TokenAlgorithm.losses`. Raises ContractError for a second update on the same rollout."""
        if micro.update > 0:
            raise ContractError(
                "ARReinforce serves one update per rollout, then the samples are another policy's. Set "
                "stack.num_updates_per_batch: 1, or algorithm._target_: unirl.algorithms.ar_cispo.ARCISPO."
            )
        yield from super().losses(micro)

    def surrogate(self, rows: TokenRows) -> tuple[Tensor, RowMetrics]:
        """The score function."""
        return -rows.advantage_M * rows.logp_M, RowMetrics()
