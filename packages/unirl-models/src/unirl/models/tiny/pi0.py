"""A tiny pi0 with random weights, as a folder that transformers saved, and one as lerobot publishes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from unirl.models.action.pi0.bundle import released_name
from unirl.models.extras import from_extra
from unirl.models.tiny.text import byte_tokenizer

with from_extra("transformers"):
    import transformers
    from safetensors.torch import save_file

IMAGE_TOKEN, VOCABULARY = 299, 300


def config() -> Any:  # Any: of transformers
    """Two layers of width 16 and 12, images of 32 pixels."""
    text = {"model_type": "gemma", "hidden_size": 16, "intermediate_size": 24, "vocab_size": VOCABULARY}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 8,
        "image_size": 32,
        "vision_use_head": False,
    }
    return transformers.PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {**text, **heads},
            "vision_config": vision,
            "projection_dim": 16,
            "image_token_id": IMAGE_TOKEN,
        },
        dit_config={**text, **heads, "hidden_size": 12},
        chunk_size=4,
        max_state_dim=8,
        max_action_dim=6,
        num_inference_steps=4,
    )


def save(folder: Path, *, as_lerobot: bool = False) -> Path:
    """A folder of transformers; of lerobot, whose config.json names its sizes and whose tokenizer is elsewhere."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.PI0ForConditionalGeneration(config())
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms too, or much would be 0
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder)
    if as_lerobot:
        weights = {released_name(name): tensor for name, tensor in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = byte_tokenizer({"<pad>": 0, "<s>": 1, "</s>": 2}, bos_token="<s>", pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "words" if as_lerobot else folder)
    if as_lerobot:
        own = {"type": "pi0", "chunk_size": 4, "max_state_dim": 8, "max_action_dim": 6, "paligemma_variant": "tiny"}
        (folder / "config.json").write_text(json.dumps(own))
    return folder
