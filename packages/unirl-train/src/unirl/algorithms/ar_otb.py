"""OTB: advantages of tokens by the baseline of least variance at each position of an answer.

Sources: Li et al. 2026 (arXiv 2602.07078); verl's `optimal_token_baseline`.
Legend: M trained tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.base import MicroBatch, RowMetrics
from unirl.algorithms.token_losses import optimal_token_advantages
from unirl.algorithms.tokens import TrainedTokens
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.protocols.models import AutoregressivePipeline, TokenStats
from unirl.types.protocols.training import PolicyStore


@bounded("algorithm")
class AROTB(ARGRPO):
    """ARGRPO's surrogate on rewards minus the optimal baseline of their position, see `optimal_token_advantages`.

    samples_per_group: the samples of a prompt, which a micro-batch holds together.
    What the stack passes as advantages is the reward up to a constant of the group (`advantages.preset: dr_grpo`, or
    one that divides too); the baseline takes any constant away. Everything else: see `ARGRPO`.
    """

    freezes_fields: ClassVar[bool] = True
    unit_option: ClassVar[str | None] = "samples_per_group"

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        samples_per_group: PositiveInt,
        **options: Any,  # Any: the keywords of ARGRPO
    ) -> None:
        self.samples_per_unit = samples_per_group
        super().__init__(pipeline, policies, **options)
        self.uses_anchor = True

    def trust_rollout(self) -> None:
        """The baseline needs a replay before the first update anyway, so its log-probs are taken too."""

    def anchor_fields(
        self, micro: MicroBatch, stats: TokenStats, trained: TrainedTokens, reference_logp_M: Tensor | None
    ) -> dict[str, Tensor]:
        """Advantage of every token [M] under the policy before the first update."""
        probability_M = trained.of(stats.logp_N).exp()
        energy_M = 1 - 2 * probability_M + trained.of(stats.collision_N)
        advantage_M = optimal_token_advantages(
            micro.advantages, energy_M, trained.lengths_B, samples_per_group=self.samples_per_unit
        )
        return {"advantage": advantage_M.float(), "energy": energy_M}

    def token_advantages(self, micro: MicroBatch, trained: TrainedTokens) -> Tensor:
        """The advantage of every token [M]."""
        return micro.anchor["advantage"]

    def added_loss(self, micro: MicroBatch, stats: TokenStats, trained: TrainedTokens, metrics: RowMetrics) -> None:
        """None; reports how long the scores of tokens are."""
        metrics.mean("otb/score_energy", micro.anchor["energy"])
