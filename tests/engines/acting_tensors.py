"""Every kind of tensor that a push brings: the engine's answers depend on it, and follow it."""

from collections.abc import Collection
from typing import Any

import torch
from letters_model import TOLERANCE

from unirl.types.rollout import RolloutReq


def replay_gap(engine: Any, pipeline: Any, req: RolloutReq) -> float:
    """Largest |log-prob of the engine - of a replay| of fresh samples."""
    track = engine.generate(req).tracks["text"]
    with pipeline.evaluating(), torch.no_grad():
        replayed = pipeline.replay(track.conditions, track.segment, track.segment.params).logp_N
    return float((replayed - track.segment.log_probs).abs().max())


def assert_every_tensor_acts(
    engine: Any, pipeline: Any, backend: Any, sync: Any, req: RolloutReq, unread: Collection[str]
) -> None:
    """Change one tensor of each kind, the one in the last layer: the samples of the request are of other log-probs
    before the push, and of the replay's after it.

    unread: parts of the names of tensors that no answer depends on.
    """
    generator = torch.Generator().manual_seed(1)
    assert replay_gap(engine, pipeline, req) < TOLERANCE
    assert sync.push()["sync/logprob_gap_max"] < TOLERANCE
    read = [name for name in backend.parameters if not any(part in name for part in unread)]
    for name in {"".join(letter for letter in name if not letter.isdigit()): name for name in read}.values():
        parameter = backend.parameters[name].detach()
        parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std().clamp(0.1))
        stale = replay_gap(engine, pipeline, req)
        assert stale > 3 * TOLERANCE, f"{name} does not matter: {stale}"
        sync.push()
        assert replay_gap(engine, pipeline, req) < 3 * TOLERANCE, name
