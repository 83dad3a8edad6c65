"""What crosses between the trainer's process and vLLM's, beside the messages that engines share."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.rollout.engine.child.messages import EngineReady, MessageCodec
from unirl.rollout.engine.served_text.call import Generate, Generations


@dataclass(frozen=True, kw_only=True)
class Ready(EngineReady):
    """First message back, when the model is loaded."""

    vocab_size: int
    context_length: int
    max_running: int
    """Samples that it writes at once."""
    num_tensors: int
    """Tensors of the model's checkpoint: what a full push must bring."""
    image_token: int | None = None
    """What the model reads as a piece of a picture; None where it reads text alone."""


CODEC = MessageCodec("vLLM", Ready, Generate, Generations)
