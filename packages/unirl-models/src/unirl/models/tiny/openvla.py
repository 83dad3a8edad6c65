"""A tiny OpenVLA with random weights, as a folder in the released layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from unirl.models.action.openvla.configuration import OpenVLAShape
from unirl.models.action.openvla.network import OpenVLANetwork
from unirl.models.extras import from_extra
from unirl.models.tiny.text import byte_tokenizer

with from_extra("transformers"):
    from safetensors.torch import save_file

CONFIG: dict[str, Any] = {  # Any: JSON values
    "model_type": "openvla",
    "text_config": {
        "model_type": "llama",
        "vocab_size": 576,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    },
    "towers": [
        {"width": 12, "depth": 3, "heads": 2, "hidden": 24, "patch": 8, "registers": 2, "has_class": True},
        {"width": 8, "depth": 3, "heads": 2, "hidden": 14, "patch": 8},
    ],
    "image_sizes": [32, 32],
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
}
"""512 words, of which the last 256 are numbers, and 64 that fill up."""
UNREAD = {
    "vision_backbone.featurizer.norm.weight": (12,),
    "vision_backbone.fused_featurizer.attn_pool.latent": (1, 1, 8),
}
"""Some weights of a released folder that nothing reads."""


def save(folder: Path) -> Path:
    """The folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = OpenVLANetwork(OpenVLAShape.read(CONFIG, folder), num_tokens=1)
        weights = {name: 0.3 * torch.randn_like(value) for name, value in network.state_dict().items()}
        weights |= {name: torch.randn(shape) for name, shape in UNREAD.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = byte_tokenizer({"<unk>": 0, "<s>": 1, "</s>": 2}, bos_token="<s>", pad_token="<unk>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    return folder
