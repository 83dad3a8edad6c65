"""A random Janus in the folder layout of transformers: the model, its configurations, processor and tokenizer.

Any stands for classes of transformers, which it types as unions with placeholders.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import processors
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

from unirl.models.tiny.text import byte_tokenizer

BOS, EOS, PAD = "<begin>", "<end>", "<pad>"
IMAGE_WORDS = {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
TEMPLATE = (
    "{% for m in messages %}{{ '<|User|>: ' if m['role'] == 'user' else '<|Assistant|>: ' }}"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)
"""Writes what the released template writes for one message of text; the token of the beginning is not part of it."""


def janus_tokenizer() -> Any:
    """Bytes first, then the marks; the mark of the beginning is added by the tokenizer, as in the release."""
    tokenizer = byte_tokenizer(
        {}, bos_token=BOS, eos_token=EOS, pad_token=PAD, extra_special_tokens=IMAGE_WORDS, padding_side="left"
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    return tokenizer


def janus(*, is_tied: bool = False, **changes: Any) -> Any:
    """Two layers of width 64 over 32 codes, images of 16 x 16 pixels in 4 x 4 codes; peaked softmaxes. changes: of the
    language model."""
    tokenizer = janus_tokenizer()
    torch.manual_seed(0)
    text: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }
    width = text["hidden_size"]
    config = transformers.JanusConfig(
        text_config=text,
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "mlp_ratio": 2.0,
            "projection_dim": width,
            "num_image_tokens": 16,
        },
        vq_config={
            "embed_dim": 8,
            "num_embeddings": 32,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1],
            "num_res_blocks": 1,
            "projection_dim": width,
            "image_token_embed_dim": width,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_WORDS["image_token"]),
        tie_word_embeddings=is_tied,
    )
    model = transformers.JanusForConditionalGeneration(config)
    with torch.no_grad():  # as drawn, all codes would be nearly as likely and embedded alike
        for part, scale in ((model.model.generation_head, 1.5), (model.model.generation_aligner, 4.0)):
            for parameter in part.parameters():
                parameter.mul_(scale)
        model.model.generation_embeddings.weight.normal_()
    generation: Any = model.generation_config
    generation.bos_token_id, generation.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    generation.eos_token_id = tokenizer.eos_token_id
    generation.guidance_scale = 5
    generation.boi_token_id = tokenizer.convert_tokens_to_ids(IMAGE_WORDS["boi_token"])
    return model


def save_janus(model: Any, folder: Path) -> Path:
    """The folder that a download gives."""
    model.save_pretrained(folder)
    image_processor = JanusImageProcessorPil(
        image_mean=[0.5] * 3, image_std=[0.5] * 3, size={"height": 16, "width": 16}
    )
    transformers.JanusProcessor(
        image_processor=image_processor,
        tokenizer=janus_tokenizer(),
        chat_template=TEMPLATE,
        num_image_tokens=16,
    ).save_pretrained(folder)
    return folder
