"""Fine-tuning on the policy's own weighted samples: flow matching, without ratio, clip or baseline.

Which method it is lies in the weights (`unirl.algorithms.sample_weights`): reward-weighted regression (Lee et al. 2023,
arXiv 2302.12192), RAFT (Dong et al. 2023, arXiv 2304.06767) or rejection fine-tuning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics
from unirl.algorithms.forward_process import ForwardProcessAlgorithm
from unirl.algorithms.losses import velocity_distance
from unirl.algorithms.sample_weights import require_weights


class WeightedMatching(ForwardProcessAlgorithm):
    """w mean (v - (eps - x0))^2 for every level of a sample of weight w >= 0.

    Everything else, the penalty towards the reference included: see `ForwardProcessAlgorithm`.
    """

    requires_weights: ClassVar[bool] = True

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part a chunk of rows: sum over (sample, level). Raises ConfigError for weights below 0."""
        require_weights(micro.advantages, type(self).__name__)
        for _, rows in self.forward_rows(micro):
            v_reference = self.reference.evaluate(rows.velocity)
            v = rows.velocity()
            error_R = velocity_distance(v, rows.target)
            loss_R = micro.advantages[rows.sample_R] * error_R
            metrics = RowMetrics()
            metrics.mean("policy/loss", loss_R)
            metrics.mean("matching/error", error_R)
            loss_R = loss_R + self.reference_penalty(v, v_reference, metrics, loss=loss_R)
            yield LossPart(loss_R.sum(), loss_R.numel(), metrics)
