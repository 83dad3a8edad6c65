"""DDPO: the denoising trajectory as an episode, its policy gradient as a score function or with importance sampling.

Source: Black et al. 2023 (arXiv 2305.13301). Its kernel is `unirl.sde.kernels.DDIMStrategy`; any other serves as well.
Its running statistics of each prompt are `unirl.algorithms.prompt_statistics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics, report_ratio
from unirl.algorithms.losses import clipped_surrogate
from unirl.algorithms.transitions import TransitionAlgorithm, TransitionRows
from unirl.types.bounds import OpenUnitInterval, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore

Estimator = Literal["score_function", "importance_sampling"]
DEFAULT_CLIP = 1e-4


@bounded("algorithm")
class DDPO(TransitionAlgorithm):
    """-A log p ("score_function") or PPO's clipped -A r ("importance_sampling") for every transition.

    estimator: the score function is unbiased under the policy that sampled alone, so a rollout serves one update;
        importance sampling serves several. Their gradients are equal at r = 1.
    clip_range: half-width of the ratio band of importance sampling, 1e-4 where it is left out; see `DiffusionGRPO`.
    Everything else: see `TransitionAlgorithm`. The score function needs no anchor: `old_logp_source: rollout` saves it.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        estimator: Estimator = "importance_sampling",
        clip_range: OpenUnitInterval | None = None,
        **options: Any,  # Any: the keywords of TransitionAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        if clip_range is not None and estimator == "score_function":
            raise ConfigError(
                f"algorithm.clip_range = {clip_range} does nothing with estimator = 'score_function'. "
                "Set clip_range: null, or estimator: importance_sampling."
            )
        self.estimator: Estimator = estimator
        self.clip_range = DEFAULT_CLIP if clip_range is None else clip_range

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """See `TransitionAlgorithm.losses`. Raises ContractError for a score function of another policy's samples."""
        if self.estimator == "score_function" and micro.update > 0:
            raise ContractError(
                "estimator = 'score_function' serves one update per rollout, then the samples are another policy's. "
                "Set stack.num_updates_per_batch: 1, or estimator: importance_sampling."
            )
        yield from super().losses(micro)

    def surrogate(self, rows: TransitionRows) -> tuple[Tensor, RowMetrics]:
        """The chosen estimator's loss."""
        metrics = RowMetrics()
        report_ratio(metrics, rows.log_ratio_R)
        if self.estimator == "score_function":
            return -rows.advantage_R * rows.policy.logp_R, metrics
        loss_R, measured = clipped_surrogate(
            rows.policy.logp_R,
            rows.anchor_logp_R,
            rows.advantage_R,
            clip_low=self.clip_range,
            clip_high=self.clip_range,
        )
        metrics.mean("policy/clipfrac_high", measured["clipped_high"])
        metrics.mean("policy/clipfrac_low", measured["clipped_low"])
        return loss_R, metrics
