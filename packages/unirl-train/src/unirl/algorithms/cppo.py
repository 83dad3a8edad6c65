"""CPPO: Flow-DPPO's mask with a trust region that is tighter at early steps and where earlier steps have used it up.

The published method masks tokens of a language model; its bound holds for any episode of fixed length whose later
states depend on earlier actions, and for a KL as for the total variation. Here an episode is a denoising trajectory
and the divergence of a step is the exact Gaussian KL per latent element, as in Flow-DPPO. No diffusion results are
published. Source: Mao et al. 2026 (arXiv 2606.10968), eqs. 8 to 11.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from unirl.algorithms.base import RowMetrics
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.algorithms.losses import prefix_budget
from unirl.algorithms.transitions import TransitionRows
from unirl.types.bounds import NonNegativeOrInf, PositiveFraction, bounded
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class CPPO(FlowDPPO):
    """-A r where the weighted divergence of the step and of the steps before it allows, see `losses.prefix_budget`.

    threshold: of the weighted divergence of one step, nats per latent element, as in FlowDPPO.
    prefix_threshold: largest weighted mean of the divergences of a trajectory's steps so far; .inf sets no budget. The
        published ablation with a KL has a fiftieth of the threshold, the runs with total variation a tenth to a fifth.
    weight_floor: weight of the last step, in (0, 1]; the first has 1, so the last may move 1 / weight_floor times as
        far. 1 weights all alike.
    rows_per_forward: where set, a multiple of the trained steps, because a sample's steps are masked together.
    With prefix_threshold = .inf and weight_floor = 1 this is Flow-DPPO.
    """

    joins_steps: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        prefix_threshold: NonNegativeOrInf,
        weight_floor: PositiveFraction = 0.8,
        **options: Any,  # Any: the keywords of FlowDPPO
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.prefix_threshold = prefix_threshold
        self.weight_floor = weight_floor

    def outside(self, kl_R: Tensor, rows: TransitionRows, metrics: RowMetrics) -> Tensor:
        """bool [R]: which rows have left the trust region."""
        is_outside_R, is_over_budget_R = prefix_budget(
            kl_R.cpu(),
            rows.sample_R,
            rows.step_R,
            threshold=self.threshold,
            prefix_threshold=self.prefix_threshold,
            weight_floor=self.weight_floor,
        )
        metrics.mean("cppo/over_budget_fraction", is_over_budget_R)
        return is_outside_R
