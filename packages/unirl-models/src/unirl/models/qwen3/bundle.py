"""Qwen3's model and tokenizer."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.causal_lm.routing import RoutedTokens
from unirl.types.protocols.models import RecomputeContexts, TokenExchange


class Qwen3Bundle(CausalLMBundle):
    """Qwen3, see `CausalLMBundle`."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The decoder layers, sharded, checkpointed and compiled one by one."""
        return ("Qwen3DecoderLayer",)


class Qwen3MoeBundle(RoutedTokens, Qwen3Bundle):
    """Qwen3 with experts, of which each token goes to a few."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    cuts_layers: ClassVar[bool] = False
    spreads_experts: ClassVar[bool] = True
    gate_class_names: ClassVar[tuple[str, ...]] = ("Qwen3MoeTopKRouter",)
    expert_class_names: ClassVar[tuple[str, ...]] = ("Qwen3MoeExperts",)
    expert_layers: ClassVar[tuple[str, ...]] = ("experts", "gate_proj", "up_proj", "gate_up_proj", "down_proj")

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The decoder layers."""
        return ("Qwen3MoeDecoderLayer",)

    def spread_tokens(self, exchange: TokenExchange) -> RecomputeContexts:
        """See the base."""
        super().spread_tokens(exchange)
        return self.recompute_contexts
