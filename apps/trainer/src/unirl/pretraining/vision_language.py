"""A small Qwen2.5-VL: two blocks of vision, two decoder layers, and the processor of its images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from unirl.pretraining.text import END, PAD

PATCH_SIDE = 8
"""Pixels. Two by two patches become one token."""
VISION_WIDTH = 64


def make_image_processor(image_side: int) -> Qwen2VLImageProcessorPil:
    """Takes square images of `image_side` pixels as they are."""
    size = {"shortest_edge": image_side**2, "longest_edge": image_side**2}
    return Qwen2VLImageProcessorPil(patch_size=PATCH_SIDE, size=size)


def make_qwen_vl(
    token_id: Callable[[str], Any], *, vocab_size: int, width: int, num_heads: int
) -> Qwen2_5_VLForConditionalGeneration:  # Any: a tokenizer's convert_tokens_to_ids may return a list
    """The model with random weights. token_id: number of each of Qwen's markers. width: of the language model."""
    text: dict[str, Any] = {  # Any: values of several types
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.05,
        # Rows and columns get the lower frequencies; at the usual base they would not tell neighbours apart.
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10.0},
        "eos_token_id": token_id(END),
        "pad_token_id": token_id(PAD),
        "bos_token_id": None,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": VISION_WIDTH,
        "intermediate_size": 2 * VISION_WIDTH,
        "num_heads": 2,
        "patch_size": PATCH_SIDE,
        "out_hidden_size": width,
        "initializer_range": 0.05,
        "window_size": 2 * PATCH_SIDE,
        "fullatt_block_indexes": [0, 1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config)
