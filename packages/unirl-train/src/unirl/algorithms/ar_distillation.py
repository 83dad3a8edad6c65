"""On-policy distillation of tokens: the student writes, the teacher judges each of its tokens.

The gradient is that of the reverse KL of the next token, KL(student || teacher), at the prefixes that the student
writes itself. It is estimated from the sampled tokens: the expectation of (log p - log p_teacher) grad log p over the
next token is grad KL.
Sources: Agarwal et al. 2023 (arXiv 2306.13649), GKD; Gu et al. 2023 (arXiv 2306.08543), MiniLLM; Thinking Machines Lab
2025, "On-Policy Distillation".
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.base import MicroBatch, RowMetrics, sampled_with
from unirl.algorithms.teacher import require_same_tokens
from unirl.algorithms.tokens import TrainedTokens, text_segment
from unirl.types.bounds import NonNegative, Positive, bounded
from unirl.types.errors import ContractError
from unirl.types.protocols.models import AutoregressivePipeline, TokenStats
from unirl.types.protocols.training import PolicyStore
from unirl.types.sampling import ARSamplingParams


def distillation_advantages(
    teacher_logp_M: Tensor, old_logp_M: Tensor, sample_advantage_M: Tensor, *, coef: float, reward_weight: float
) -> Tensor:
    """coef (log p_teacher - log p_old) + reward_weight A, [M]: what a token is worth, without looking ahead.

    All [M] float32, nats, without gradients; A the advantage of the token's sample. As REINFORCE's advantage it has the
    gradient -coef KL(student || teacher) of every next token, in expectation.
    """
    return coef * (teacher_logp_M - old_logp_M) + reward_weight * sample_advantage_M


@bounded("algorithm")
class ARDistillation(ARGRPO):
    """ARGRPO's clipped surrogate with the advantage of `distillation_advantages` at every token.

    teacher: name of a policy with trains: false, which reads the student's tokens at the student's temperature.
    coef: of the teacher's judgement. reward_weight: of the sample's own advantage besides it; 0 is distillation alone,
        which needs no reward.
    Everything else: see `ARGRPO`. The teacher is asked once per rollout, before the first update of its samples.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.teacher_rules"
    teacher_option: ClassVar[str | None] = "teacher"
    freezes_fields: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore,
        *,
        teacher: str,
        coef: Positive = 1.0,
        reward_weight: NonNegative = 0.0,
        **options: Any,  # Any: the keywords of ARGRPO
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.teacher_name = teacher
        self._teacher: AutoregressivePipeline | None = None
        self.coef = coef
        self.reward_weight = reward_weight
        self.uses_anchor = True

    def use_teacher(self, teacher: AutoregressivePipeline, params: ARSamplingParams) -> None:
        """Ask this pipeline. Raises ConfigError for a teacher with another tokenizer."""
        require_same_tokens(self._pipeline, teacher, self.teacher_name)
        self._teacher = teacher

    def trust_rollout(self) -> None:
        """The teacher's judgement is frozen before the first update anyway, so its log-probs are taken too."""

    def anchor_fields(
        self, micro: MicroBatch, stats: TokenStats, trained: TrainedTokens, reference_logp_M: Tensor | None
    ) -> dict[str, Tensor]:
        """log p_teacher and log p_old [M]."""
        segment = text_segment(micro.track)
        params = sampled_with(segment.params, self._params)
        teacher = self._teacher
        if teacher is None:
            raise ContractError(f"the teacher {self.teacher_name!r} was not handed over: call use_teacher first")
        with teacher.evaluating():
            judged = teacher.replay(micro.track.conditions, segment, params)
        old_M = trained.of(stats.logp_N).detach()
        return {"teacher_logp": trained.of(judged.logp_N).to(old_M), "old_logp": old_M}

    def token_advantages(self, micro: MicroBatch, trained: TrainedTokens) -> Tensor:
        """What every token is worth [M]."""
        frozen = micro.anchor
        return distillation_advantages(
            frozen["teacher_logp"],
            frozen["old_logp"],
            super().token_advantages(micro, trained),
            coef=self.coef,
            reward_weight=self.reward_weight,
        )

    def added_loss(self, micro: MicroBatch, stats: TokenStats, trained: TrainedTokens, metrics: RowMetrics) -> None:
        """Nothing to add; reports the distance to the teacher."""
        gap_M = micro.anchor["old_logp"] - micro.anchor["teacher_logp"]
        metrics.mean("distillation/reverse_kl", gap_M)
        metrics.max("distillation/logp_absdiff_max", torch.abs(gap_M))
