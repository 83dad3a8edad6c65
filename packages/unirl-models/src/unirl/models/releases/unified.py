"""Folders of released unified models, whose files have the shapes of the weights and hold none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.models.bagel import configuration as bagel
from unirl.models.bagel.model import Bagel
from unirl.models.bagel.vae import AutoEncoder
from unirl.models.hunyuan_image3.configuration import HunyuanImage3Config
from unirl.models.hunyuan_image3.model import ImageParts
from unirl.models.hunyuan_image3.sizes import sizes
from unirl.models.hunyuan_image3.transformer import HunyuanImage3Decoder, expert_stacks
from unirl.models.loading import ModelFolder
from unirl.models.packed.vision import VisionConfig
from unirl.models.packed.weights import SINGLE
from unirl.models.tiny.text import byte_tokenizer
from unirl.types.weights import in_published_parts

Settings = dict[str, Any]  # Any: JSON values

BAGEL = bagel.BagelConfig(
    language=bagel.LanguageConfig(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=32768,
    ),
    vision=VisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=26,
        num_attention_heads=16,
        patch_size=14,
        num_channels=3,
        layer_norm_eps=1e-6,
        patches_per_side=70,
    ),
    vae=bagel.VAEConfig(),
    max_latent_size=64,
)
BAGEL_WORDS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>")
HUNYUAN_IMAGE3: Settings = {
    "model_type": "hunyuan_image_3_moe",
    "vocab_size": 133120,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "num_experts": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 22800,
    "intermediate_size": 3072,
    "moe_intermediate_size": 3072,
    "num_shared_expert": 1,
    "moe_topk": 8,
    "image_base_size": 1024,
    "patch_embed_hidden_dim": 1024,
    "vit": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 16,
        "num_channels": 3,
        "layer_norm_eps": 1e-6,
        "num_patches": 256,
    },
    "vit_processor": {"max_num_patches": 1024},
    "vae": {
        "block_out_channels": [128, 256, 512, 1024, 1024],
        "layers_per_block": 2,
        "latent_channels": 32,
        "ffactor_spatial": 16,
        "ffactor_temporal": 4,
        "scaling_factor": 0.562679178327931,
        "shift_factor": None,
    },
}
HUNYUAN_WORDS = (
    *("<boi>", "<eoi>", "<img>", "<cfg>", "<recaption>", "</recaption>", "<think>", "</think>", "<answer>"),
    *("</answer>", "<timestep>", "<guidance>", "<timestep_r>", "<joint_img_sep>"),
)


def write_bagel(folder: Path) -> None:
    """The folder of BAGEL-7B-MoT."""
    with torch.device("meta"):
        model, autoencoder = Bagel(BAGEL), AutoEncoder(BAGEL.vae)
    write_shapes(folder / bagel.MODEL_FILE, model.state_dict())
    write_shapes(folder / bagel.VAE_FILE, autoencoder.state_dict())
    _write(folder / bagel.LANGUAGE_CONFIG, {"model_type": "qwen2", **vars(BAGEL.language)})
    _write(folder / bagel.VISION_CONFIG, {"model_type": "siglip_vision_model", **vars(BAGEL.vision)})
    _write(folder / "config.json", {"model_type": "bagel", "latent_patch_size": BAGEL.latent_patch})
    byte_tokenizer(
        {}, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=[*BAGEL_WORDS]
    ).save_pretrained(folder)


def write_hunyuan_image3(folder: Path) -> None:
    """The folder of HunyuanImage-3.0-Instruct."""
    _write(folder / "config.json", HUNYUAN_IMAGE3)
    _write(folder / "generation_config.json", {"sequence_template": "instruct", "drop_think": False})
    config = HunyuanImage3Config.of_folder(ModelFolder(folder, HUNYUAN_IMAGE3))
    with torch.device("meta"):
        decoder, images = HunyuanImage3Decoder(config.decoder), ImageParts(config)
    published = in_published_parts(decoder.state_dict(), expert_stacks(decoder))
    write_shapes(folder / SINGLE, {**published, **images.state_dict()})
    ratios = [f"<img_ratio_{number}>" for number in range(len(sizes(config.base_size)))]
    byte_tokenizer(
        {},
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<pad>",
        additional_special_tokens=[*HUNYUAN_WORDS, f"<img_size_{config.base_size}>", *ratios],
    ).save_pretrained(folder)


UNIFIED_MODELS: Mapping[str, Callable[[Path], None]] = {
    "ByteDance-Seed/BAGEL-7B-MoT": write_bagel,
    "tencent/HunyuanImage-3.0-Instruct": write_hunyuan_image3,
}
"""By repository: what writes its folder, which exists."""


def write_shapes(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file in bfloat16 with a true header and a hole where the weights would be, which takes no disk."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * math.prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + end)


def _write(path: Path, content: Settings) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
