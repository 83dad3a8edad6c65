"""The language model of Qwen3.5 alone, and the whole model that also sees images."""

from __future__ import annotations

from typing import ClassVar

from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.causal_lm.recurrent import KEPT_WHOLE
from unirl.models.causal_lm.routing import RoutedTokens
from unirl.models.qwen_vl.bundle import QwenVLBundle

_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
"""Projections of both kinds of attention, without the two of linear attention that give one number per head
(`in_proj_a`, `in_proj_b`): how much of the state is kept and written."""


class Qwen35Bundle(CausalLMBundle):
    """The language model of Qwen3.5, see `CausalLMBundle`.

    Released folders hold a vision tower too, which is left out, as it is of exports; `Qwen35VLBundle` keeps it.
    """

    spreads_tokens: ClassVar[bool] = False
    kept_whole: ClassVar[str] = KEPT_WHOLE
    cuts_layers: ClassVar[bool] = False
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5")
    recurrent_class_names: ClassVar[tuple[str, ...]] = ("Qwen3_5GatedDeltaNet",)
    lora_target_modules: tuple[str, ...] = _LORA_TARGETS

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The decoder layers."""
        return ("Qwen3_5DecoderLayer",)


class Qwen35MoeBundle(RoutedTokens, Qwen35Bundle):
    """The language model of Qwen3.5 with experts, of which each token goes to a few, and one more that all share."""

    spreads_experts: ClassVar[bool] = True
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text", "qwen3_5_moe")
    recurrent_class_names: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeGatedDeltaNet",)
    gate_class_names: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeTopKRouter",)
    expert_class_names: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeExperts",)
    expert_layers: ClassVar[tuple[str, ...]] = ("experts", "gate_proj", "up_proj", "gate_up_proj", "down_proj")

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The decoder layers."""
        return ("Qwen3_5MoeDecoderLayer",)


class Qwen35VLBundle(QwenVLBundle):
    """Qwen3.5 with its vision tower, see `QwenVLBundle`."""

    spreads_tokens: ClassVar[bool] = False
    kept_whole: ClassVar[str] = KEPT_WHOLE
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5",)
    recurrent_class_names: ClassVar[tuple[str, ...]] = ("Qwen3_5GatedDeltaNet",)
    lora_target_modules: tuple[str, ...] = _LORA_TARGETS

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The decoder layers. The vision tower stays whole, as in the base."""
        return ("Qwen3_5DecoderLayer",)
