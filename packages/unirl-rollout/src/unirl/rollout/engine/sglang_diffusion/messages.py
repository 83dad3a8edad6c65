"""SGLang Diffusion's messages, besides those that all engines share."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.rollout.engine.child.messages import EngineReady, MessageCodec
from unirl.rollout.engine.served_latents.call import SampledLatents, SampleLatents


@dataclass(frozen=True, kw_only=True)
class Ready(EngineReady):
    """First message back, sent when the model is loaded."""

    pipeline: str
    """Import path of SGLang's pipeline class."""
    transformer: str
    """Import path of the transformer class."""
    num_parameters: int
    """Tensors of the transformer that a push must reach."""


CODEC = MessageCodec("SGLang Diffusion", Ready, SampleLatents, SampledLatents)
