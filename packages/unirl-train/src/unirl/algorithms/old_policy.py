"""The old policy of methods on the forward process: a named copy that follows the trained one, once per rollout."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.forward_process import ForwardProcessAlgorithm, ForwardRows
from unirl.algorithms.schedules import OldPolicyDecay
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore

OLD = "old"
"""Name of the copy."""


class FollowedByOldPolicy(ForwardProcessAlgorithm):
    """Base of the methods that compare the trained policy with an old one.

    decay: how the old policy follows, once per rollout; None: `default_decay`.
    Everything else: see `ForwardProcessAlgorithm`.
    """

    metric_prefix: ClassVar[str] = "old_policy"
    """Prefix of the names of its metrics."""
    default_decay: ClassVar[OldPolicyDecay] = OldPolicyDecay()

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        decay: OldPolicyDecay | None = None,
        **options: Any,  # Any: the keywords of ForwardProcessAlgorithm
    ) -> None:
        super().__init__(pipeline, policies, **options)
        self.decay = decay if decay is not None else self.default_decay

    def prepare(self) -> None:
        """Keep the starting weights as the old policy."""
        self._policies.keep_policy(OLD)

    def old_velocity(self, rows: ForwardRows) -> Tensor:
        """The old policy's velocities [R, ...], without gradients.

        Call it before the trained policy's forward: it swaps parameter values, which a pending backward would not
        survive.
        """
        with torch.no_grad(), self._policies.using_policy(OLD):
            return rows.velocity()

    def after_rollout(self) -> dict[str, float]:
        """Let the old policy follow: old <- d old + (1 - d) new."""
        decay = self.decay(self.num_rollouts)
        self._policies.update_policy(OLD, decay)
        return {**super().after_rollout(), f"{self.metric_prefix}/old_policy_decay": decay}
