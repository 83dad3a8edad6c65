"""A policy gradient on images: what one transition contributes to the loss."""

from __future__ import annotations

from torch import Tensor

from unirl.algorithms.base import RowMetrics, report_ratio
from unirl.algorithms.transitions import TransitionAlgorithm, TransitionRows


class MyAlgorithm(TransitionAlgorithm):
    """-A width tanh((r - 1) / width) for every transition: a clip without a corner.

    width: how far a ratio may be from 1 before its gradient fades; as `clip_range` of GRPO. Other options: of
    TransitionAlgorithm. R counts rows, one (sample, denoising step) pair each.
    """

    def __init__(self, pipeline, policies, *, width: float = 5e-3, **options) -> None:
        super().__init__(pipeline, policies, **options)
        self.width = width

    def surrogate(self, rows: TransitionRows) -> tuple[Tensor, RowMetrics]:
        metrics = RowMetrics()
        report_ratio(metrics, rows.log_ratio_R)
        distance_R = rows.log_ratio_R.exp() - 1
        return -rows.advantage_R * self.width * (distance_R / self.width).tanh(), metrics
