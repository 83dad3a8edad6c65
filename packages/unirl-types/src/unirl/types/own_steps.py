"""Samples of one rollout that have one stochastic step each, not all the same.

Legend: B samples, S steps of which each sample has one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.types.segments import LatentSegment


def own_logp(segment: LatentSegment) -> Tensor | None:
    """The log-probs that samples have: [B, S], or [B, 1] of their own steps; None where there are none."""
    if segment.own_steps is None or segment.sde_logp is None:
        return segment.sde_logp
    columns = {step: column for column, step in enumerate(segment.sde_indices)}
    at = torch.tensor([columns[step] for step in segment.own_steps.tolist()], device=segment.sde_logp.device)
    return segment.sde_logp.gather(1, at[:, None])
