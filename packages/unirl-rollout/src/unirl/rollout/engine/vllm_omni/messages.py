"""What crosses between the trainer's process and vLLM-Omni's, beside the messages that engines share."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.rollout.engine.child.messages import EngineReady, MessageCodec
from unirl.rollout.engine.served_latents.call import SampledLatents, SampleLatents


@dataclass(frozen=True, kw_only=True)
class Ready(EngineReady):
    """First message back, when the model is loaded."""

    transformer: str
    """Import path of the class of the transformer."""
    num_parameters: int
    """Tensors of the transformer that a push must reach; vLLM-Omni joins some of the checkpoint's."""


CODEC = MessageCodec("vLLM-Omni", Ready, SampleLatents, SampledLatents)
