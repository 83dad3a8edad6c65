"""vLLM's messages, besides those that all engines share."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.rollout.engine.child.messages import EngineReady, MessageCodec
from unirl.rollout.engine.served_text.call import Generate, Generations


@dataclass(frozen=True, kw_only=True)
class Ready(EngineReady):
    """First message back, sent when the model is loaded."""

    vocab_size: int
    context_length: int
    max_running: int
    """Samples generated at once."""
    num_tensors: int
    """Tensors of the model's checkpoint, all of which a full push must have."""
    image_token: int | None = None
    """Token id that stands for an image patch; None if the model sees none."""
    audio_token: int | None = None
    """Token id that stands for a position of a sound; None if the model hears none."""


CODEC = MessageCodec("vLLM", Ready, Generate, Generations)
