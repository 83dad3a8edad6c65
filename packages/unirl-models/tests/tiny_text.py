"""Random language models of some 100,000 parameters in the folder layout of real ones, from their real classes.

Any stands for classes of transformers, which it types as unions with placeholders.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from unirl.models.tiny.text import byte_tokenizer

END = "<|im_end|>"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def text_tokenizer(*, chat_template: str | None = TEMPLATE) -> Any:
    """Bytes first, then Qwen's special tokens."""
    tokenizer = byte_tokenizer(
        {},
        eos_token=END,
        pad_token=SPECIAL[0],
        additional_special_tokens=[s for s in SPECIAL if s not in (END, SPECIAL[0])],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def qwen3(*, seed: int = 0, **changes: Any) -> Any:
    """Two layers of width 64, four heads of width 32, two of keys. Weights large enough for a peaked softmax."""
    values = _qwen3_values(seed)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values | changes))


def qwen2(**changes: Any) -> Any:
    """Qwen2.5, whose queries, keys and values have biases: two layers of width 64, four heads, one of keys."""
    values: dict[str, Any] = {**_qwen3_values(0), "num_key_value_heads": 1, **changes}
    del values["head_dim"]
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**values))


def qwen3_moe(**changes: Any) -> Any:
    """The same with six experts of width 24, of which a token goes to two."""
    values: dict[str, Any] = {
        **_qwen3_values(0),
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**values | changes))


def qwen3_5(**changes: Any) -> Any:
    """Four layers of width 64, three of linear attention (two heads of keys, four of values) and one of attention."""
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**_qwen3_5_values() | changes))


def qwen3_5_moe(**changes: Any) -> Any:
    """The same with six experts of width 24, of which a token goes to two, and one of the same width for all."""
    values: dict[str, Any] = {
        **_qwen3_5_values(),
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    }
    del values["intermediate_size"]
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**values | changes))


def _qwen3_5_values() -> dict[str, Any]:
    """As `_qwen3_values`; half of a head is rotated, by positions of three axes."""
    return {
        **_qwen3_values(0),
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 3, 3],
            "mrope_interleaved": True,
        },
    }


def _qwen3_values(seed: int) -> dict[str, Any]:
    """Settings of a configuration. Seeds torch after the tokenizer is made."""
    tokenizer = text_tokenizer()
    torch.manual_seed(seed)
    return {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def save_text_model(model: Any, folder: Path, *, chat_template: str | None = TEMPLATE) -> Path:
    """The folder that a real model has: weights, configurations and tokenizer."""
    model.save_pretrained(folder)
    text_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder


VISION_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH_SIZE = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_5": 16}


def qwen_vl(model_type: str, **changes: Any) -> Any:
    """Two decoder layers of width 64 and a vision tower of two blocks of width 32; three-axis rotary embeddings.

    changes: of the text part.
    """
    ids = text_tokenizer().convert_tokens_to_ids
    torch.manual_seed(0)
    text: dict[str, Any] = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
        "eos_token_id": ids(END),
        "pad_token_id": ids(SPECIAL[0]),
        **changes,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": PATCH_SIZE[model_type],
        "out_hidden_size": 64,
        "initializer_range": 0.1,
    }
    shared: dict[str, Any] = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
        "tie_word_embeddings": False,
    }
    if model_type == "qwen3_5":
        text |= _qwen3_5_values() | changes
        vision |= {"num_position_embeddings": 64}
        return transformers.Qwen3_5ForConditionalGeneration(
            transformers.Qwen3_5Config(text_config=text, vision_config=vision, **shared)
        )
    if model_type == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **shared)
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    text |= {"head_dim": 32, "rope_parameters": text["rope_parameters"] | {"mrope_interleaved": True}}
    # SGLang pads the width of this tower's feed-forward to a multiple of 64 on a CPU, and does not load a narrower one.
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "intermediate_size": 64}
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **shared)
    )


def qwen3_omni(**changes: Any) -> Any:
    """A Thinker: two decoder layers of width 64 with four experts, an audio and a vision encoder of two layers each.

    changes: of the text part.
    """
    ids = text_tokenizer().convert_tokens_to_ids
    torch.manual_seed(0)
    text: dict[str, Any] = {
        "vocab_size": 288,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 6, 6],
            "mrope_interleaved": True,
            "rope_theta": 1e4,
        },
        "eos_token_id": ids(END),
        "pad_token_id": ids(SPECIAL[0]),
        **changes,
    }
    audio: dict[str, Any] = {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "d_model": 32,
        "output_dim": 64,
        "downsample_hidden_size": 8,
        "initializer_range": 0.1,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.1,
    }
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text,
        audio_config=audio,
        vision_config=vision,
        **{
            f"{name}_token_id": ids(f"<|{word}|>")
            for name, word in (
                ("audio", "audio_pad"),
                ("audio_start", "audio_start"),
                ("image", "image_pad"),
                ("video", "video_pad"),
                ("vision_start", "vision_start"),
                ("vision_end", "vision_end"),
            )
        },
    )
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)


def save_omni_model(model: Any, folder: Path, *, chat_template: str | None = VISION_TEMPLATE) -> Path:
    """As `save_vision_model`, with the feature extractor's values in the same file."""
    save_vision_model(model, folder, chat_template=chat_template)
    path = folder / "preprocessor_config.json"
    hears = transformers.WhisperFeatureExtractor(feature_size=model.config.audio_config.num_mel_bins)
    path.write_text(json.dumps({**hears.to_dict(), **json.loads(path.read_text())}))
    return folder


def save_whole_omni(thinker: Any, folder: Path) -> Path:
    """A folder of a whole Qwen3-Omni that does not speak, as it is released: tokens of media have names."""
    config = transformers.Qwen3OmniMoeConfig(thinker_config=thinker.config.to_dict(), enable_audio_output=False)
    # Released configurations have these, the classes do not.
    own: Any = config.thinker_config
    own.text_config.tie_word_embeddings = False
    own.vision_config.image_size = 128  # of the 8 x 8 positions
    own.vision_config.apply_vit_abs_pos_embed = True
    whole = transformers.Qwen3OmniMoeForConditionalGeneration(config)
    whole.thinker.load_state_dict(thinker.state_dict())
    save_omni_model(thinker, folder)
    whole.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    names = {f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "audio", "video")}
    for kind in ("vision", "audio"):
        names |= {f"{kind}_bos_token": f"<|{kind}_start|>", f"{kind}_eos_token": f"<|{kind}_end|>"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **names, "extra_special_tokens": names}))
    return folder


def save_vision_model(model: Any, folder: Path, *, chat_template: str | None = VISION_TEMPLATE) -> Path:
    """As `save_text_model`, with the image processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    save_text_model(model, folder, chat_template=chat_template)
    patch_size = model.config.vision_config.patch_size
    Qwen2VLImageProcessorPil(
        patch_size=patch_size, size={"shortest_edge": 4 * patch_size**2, "longest_edge": 64 * patch_size**2}
    ).save_pretrained(folder)
    return folder
