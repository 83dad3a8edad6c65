"""Qwen3's model and tokenizer."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.causal_lm.bundle import CausalLMBundle


class Qwen3Bundle(CausalLMBundle):
    """Qwen3, see `CausalLMBundle`."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The decoder layers, sharded, checkpointed and compiled one by one."""
        return ("Qwen3DecoderLayer",)
