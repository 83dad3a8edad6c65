"""Configurations of released language models, which read texts, and some of them images and sounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unirl.models.releases.configurations import QWEN3_4B, QWEN3_30B_A3B, QWEN_25_7B, QWEN_25_VL_7B

Settings = Mapping[str, Any]  # Any: JSON values

IMAGE, VIDEO, VISION_START, VISION_END = 3, 4, 5, 6
AUDIO, AUDIO_START = 8, 9
"""Ids of the stand-in tokenizer."""


@dataclass(frozen=True)
class LanguageModel:
    """What a release's folder has besides weights and its tokenizer."""

    config_class: str | None
    """None where the settings are the whole config.json."""
    settings: Settings
    model_class: str
    sees: bool = False
    """True if it has an image processor."""
    patch_size: int = 14
    num_mel_bins: int | None = None
    """Channels that the feature extractor of a model that hears makes."""
    image_words: Mapping[str, str] | None = None
    """Names of the tokenizer for the marks of images that the model draws."""


_QWEN3 = ("Qwen3Config", QWEN3_4B, "Qwen3ForCausalLM")


def _qwen3_5(text: Settings, vision: Settings) -> LanguageModel:
    """A release that sees; tables of positions and ends of texts are alike in all."""
    common = {
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    settings = {
        "text_config": {**common, **text},
        "vision_config": vision,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }
    return LanguageModel("Qwen3_5Config", settings, "Qwen3_5ForConditionalGeneration", sees=True, patch_size=16)


# Widths of the 9B are the defaults of Qwen3_5TextConfig and Qwen3_5VisionConfig. Those of the others, and of all the
# reach of positions, are from memory; their parameters are those that are published, but for layers that guess several
# tokens, which transformers does not have.
_QWEN3_5: Mapping[str, LanguageModel] = {
    "Qwen/Qwen3.5-0.8B": _qwen3_5(
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
        {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "out_hidden_size": 1024},
    ),
    "Qwen/Qwen3.5-4B": _qwen3_5(
        {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560},
    ),
    "Qwen/Qwen3.5-9B": _qwen3_5({}, {"out_hidden_size": 4096}),
    "Qwen/Qwen3.5-27B": _qwen3_5(
        {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "linear_num_value_heads": 48,
        },
        {"out_hidden_size": 5120},
    ),
}
_QWEN3_5_35B = _qwen3_5({}, {"out_hidden_size": 2048})
_OMNI_THINKER: Settings = {
    "text_config": {
        **QWEN3_30B_A3B,
        "vocab_size": 152064,
        "max_position_embeddings": 65536,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "audio_config": {"output_dim": 2048},
    "vision_config": {"out_hidden_size": 2048},
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "audio_start_token_id": AUDIO_START,
}

_OPENVLA: Settings = {
    "model_type": "openvla",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "image_sizes": [224, 224],
    "pad_to_multiple_of": 64,
    "n_action_bins": 256,
}


def _janus(width: int, inner_width: int, layers: int, heads: int) -> LanguageModel:
    """Janus-Pro. The vision tower and the codes are the defaults of transformers' classes; the sizes of the language
    model and the separate output projection are from memory."""
    settings: Settings = {
        "text_config": {
            "model_type": "llama",
            "vocab_size": 102400,
            "hidden_size": width,
            "intermediate_size": inner_width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 16384,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        "vision_config": {"projection_dim": width},
        "vq_config": {"projection_dim": width, "image_token_embed_dim": width},
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
    }
    words = {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
    return LanguageModel("JanusConfig", settings, "JanusForConditionalGeneration", image_words=words)


LANGUAGE_MODELS: Mapping[str, LanguageModel] = {
    "deepseek-community/Janus-Pro-1B": _janus(2048, 5632, 24, 16),
    "deepseek-community/Janus-Pro-7B": _janus(4096, 11008, 30, 32),
    "openvla/openvla-7b": LanguageModel(None, _OPENVLA, "OpenVLAForActionPrediction"),
    "lerobot/pi0_base": LanguageModel("PI0Config", {}, "PI0ForConditionalGeneration"),
    "Qwen/Qwen3-4B": LanguageModel(*_QWEN3),
    "Qwen/Qwen3-4B-Base": LanguageModel(*_QWEN3),
    "Qwen/Qwen3-30B-A3B-Base": LanguageModel("Qwen3MoeConfig", QWEN3_30B_A3B, "Qwen3MoeForCausalLM"),
    "Qwen/Qwen2.5-VL-7B-Instruct": LanguageModel(
        "Qwen2_5_VLConfig",
        {
            **QWEN_25_VL_7B,
            "text_config": {
                **QWEN_25_7B,
                "max_position_embeddings": 128000,
                "tie_word_embeddings": False,
                "eos_token_id": 2,
                "pad_token_id": 0,
            },
            "tie_word_embeddings": False,
        },
        "Qwen2_5_VLForConditionalGeneration",
        sees=True,
    ),
    **_QWEN3_5,
    # All widths are the defaults of Qwen3_5MoeTextConfig.
    "Qwen/Qwen3.5-35B-A3B": replace(
        _QWEN3_5_35B, config_class="Qwen3_5MoeConfig", model_class="Qwen3_5MoeForConditionalGeneration"
    ),
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": LanguageModel(
        "Qwen3OmniMoeThinkerConfig",
        _OMNI_THINKER,
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        sees=True,
        patch_size=16,
        num_mel_bins=128,
    ),
}
"""By repository. Of Qwen3-Omni the Thinker, the part that is trained."""
