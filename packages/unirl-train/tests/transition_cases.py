"""What the tests of policy gradients on transitions share: micro-batches, one pass of losses, a float64 reference.

Legend: B samples, S stochastic steps, N latent elements.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusion_fakes import Setup, some_advantages
from torch import Tensor

from unirl.algorithms.base import MicroBatch
from unirl.types.rollout import RolloutTrack
from unirl.types.segments import LatentSegment


def segment_of(track: RolloutTrack) -> LatentSegment:
    """The track's latents."""
    assert isinstance(track.segment, LatentSegment)
    return track.segment


def micro_of(
    track: RolloutTrack,
    advantages: Tensor | None = None,
    *,
    anchor: dict[str, Tensor] | None = None,
    progress: float = 0.0,
) -> MicroBatch:
    """The whole track as one micro-batch."""
    advantages = advantages if advantages is not None else some_advantages(track.batch_size)
    return MicroBatch(track=track.replace(advantages=advantages), anchor=anchor or {}, update=0, progress=progress)


def anchored(made: Setup, track: RolloutTrack, shift: float = 0.0, **options: Any) -> MicroBatch:
    """A micro-batch whose ratios are exp(shift) at the present weights."""
    anchor = made.algorithm.anchor(micro_of(track))
    return micro_of(track, anchor={**anchor, "logp": anchor["logp"] - shift}, **options)


def run(made: Setup, micro: MicroBatch) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Mean loss over all terms, its gradient, and the metrics."""
    made.backend.zero_grad()
    total = made.algorithm.num_terms(micro.track)
    value, sums, maxima = 0.0, {}, {}
    for part in made.algorithm.losses(micro):
        (part.loss / total).backward()
        value += float(part.loss.detach()) / total
        for name, (added, count) in part.metrics.sums.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = (before[0] + float(added), before[1] + count)
        maxima.update({name: float(largest) for name, largest in part.metrics.maxima.items()})
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in made.backend.parameters.items()
        if parameter.grad is not None
    }
    return value, gradients, {name: added / count for name, (added, count) in sums.items() if count} | maxima


def close(mine: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Two sets of gradients agree."""
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=rtol, atol=atol)


def flow_transitions(track: RolloutTrack, theta: Tensor, eta: float, is_dance: bool = False) -> dict[str, Tensor]:
    """Means [B, S, N], std [S], |dt| [S] and log-probs [B, S] of the affine field, by the formulas, in float64."""
    segment = segment_of(track)
    sigmas = segment.sigmas.double()
    x = torch.stack([segment.latents_at(step) for step in segment.sde_indices], dim=1).double().flatten(2)
    y = torch.stack([segment.latents_at(step + 1) for step in segment.sde_indices], dim=1).double().flatten(2)
    sigma, following = sigmas[segment.sde_indices], sigmas[[step + 1 for step in segment.sde_indices]]
    dt = following - sigma
    below = torch.where(sigma == 1, sigmas[1], sigma)
    q = torch.full_like(sigma, eta) if is_dance else eta * (sigma / (1 - below)).sqrt()
    std = q * (-dt).sqrt()
    v = theta[0] * x + theta[1]
    noise = x + (1 - sigma)[:, None] * v
    mean = x + v * dt[:, None] + (q.square() / (2 * sigma) * dt)[:, None] * noise
    logp = -((y - mean).square().mean(-1)) / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)
    return {"mean": mean, "std": std, "dt": -dt, "logp": logp}
