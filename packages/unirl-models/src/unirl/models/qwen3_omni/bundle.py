"""The Thinker of Qwen3-Omni with its tokenizer, image processor and feature extractor."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.causal_lm.routing import RoutedTokens
from unirl.models.extras import from_extra
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.token_scores import CHUNK_LOGITS
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import CheckpointError

with from_extra("transformers"):
    import transformers


@bounded("bundle")
class Qwen3OmniThinkerBundle(RoutedTokens, QwenVLBundle):
    """The Thinker alone, from a folder of the whole Qwen3-Omni or of the Thinker; exports are of the Thinker.

    freeze_vision, min_pixels, max_pixels: see `QwenVLBundle`. freeze_audio: whether the audio encoder keeps its
    weights; LoRA leaves both encoders alone in any case.
    """

    reads_images_in_turns: ClassVar[bool] = False
    reads_audio: ClassVar[bool] = True
    spreads_experts: ClassVar[bool] = True
    gate_class_names: ClassVar[tuple[str, ...]] = ("Qwen3OmniMoeThinkerTextTopKRouter",)
    expert_class_names: ClassVar[tuple[str, ...]] = ("Qwen3OmniMoeThinkerTextExperts",)
    expert_layers: ClassVar[tuple[str, ...]] = ("experts", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")
    auto_class: ClassVar[Any] = transformers.Qwen3OmniMoeThinkerForConditionalGeneration  # Any: see the base

    def __init__(
        self,
        pretrained_model: str,
        dtype: str = "fp32",
        device: str | torch.device = "cpu",
        *,
        freeze_vision: bool = True,
        freeze_audio: bool = True,
        min_pixels: PositiveInt | None = None,
        max_pixels: PositiveInt | None = None,
        chunk_logits: PositiveInt = CHUNK_LOGITS,
        defers_weights: bool = False,
    ) -> None:
        super().__init__(
            pretrained_model,
            dtype,
            device,
            freeze_vision=freeze_vision,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            chunk_logits=chunk_logits,
            defers_weights=defers_weights,
        )
        self.model.audio_tower.requires_grad_(not freeze_audio)
        # By their whole names: the audio encoder's projections end alike.
        self.lora_target_modules = tuple(
            f"model.layers.{layer}.self_attn.{name}"
            for layer in range(len(self.model.model.layers))
            for name in CausalLMBundle.lora_target_modules
        )
        self.feature_extractor = self._load_feature_extractor()

    @property
    def vision_tower(self) -> nn.Module:
        return self.model.visual

    @property
    def decoder(self) -> nn.Module:
        return self.model.model

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """The decoder layers; the encoders stay whole, see `QwenVLBundle`."""
        return ("Qwen3OmniMoeThinkerTextDecoderLayer",)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Those of images and sounds."""
        return (self.image_token_id, self.audio_token_id)

    @property
    def audio_token_id(self) -> int:
        """The placeholder that stands for one position of the audio encoder's output."""
        return int(self.model.config.audio_token_id)

    def _load_feature_extractor(self) -> transformers.WhisperFeatureExtractor:
        try:
            extractor = transformers.WhisperFeatureExtractor.from_pretrained(self.folder.path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder.path} has no feature extractor that loads: {error}") from error
        expected = self.model.config.audio_config.num_mel_bins
        if extractor.feature_size != expected:
            raise CheckpointError(
                f"{self.folder.path}: the feature extractor makes {extractor.feature_size} mel bins, the audio encoder "
                f"reads {expected}. Their files are of different models: fetch the folder again."
            )
        return extractor
