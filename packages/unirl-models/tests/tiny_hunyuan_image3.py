"""A random HunyuanImage3 of some million parameters in the folder layout of the real one, of its real classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unirl.models.hunyuan_image3.configuration import DecoderConfig, HunyuanImage3Config, LayerConfig, VAEConfig
from unirl.models.hunyuan_image3.model import ImageParts
from unirl.models.hunyuan_image3.transformer import HunyuanImage3Decoder, expert_stacks
from unirl.models.packed.vision import VisionConfig
from unirl.models.packed.weights import INDEX
from unirl.models.tiny.text import byte_tokenizer
from unirl.types.weights import in_published_parts

WORDS = [
    *("<boi>", "<eoi>", "<img>", "<cfg>", "<recaption>", "</recaption>", "<think>", "</think>", "<answer>"),
    *("</answer>", "<timestep>", "<guidance>", "<timestep_r>", "<joint_img_sep>", "<img_size_64>"),
    *(f"<img_ratio_{place}>" for place in range(37)),
]

TINY = HunyuanImage3Config(
    decoder=DecoderConfig(
        vocab_size=320,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=512,
        layers=(
            LayerConfig(expert_width=32, shared_width=48, top_k=2),
            LayerConfig(expert_width=32, shared_width=48, top_k=2),
        ),
    ),
    vision=VisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        patch_size=16,
        num_channels=3,
        layer_norm_eps=1e-6,
        patches_per_side=4,
    ),
    vae=VAEConfig(
        channels=(32, 32, 32, 64, 64),
        blocks=1,
        latent_channels=32,
        factor=16,
        temporal_factor=4,
        scale=0.562679178327931,
        shift=0.0,
    ),
    patch_width=32,
    base_size=64,
    most_patches=7,
)
"""An image of 32 x 96 pixels has 2 x 6 latent tokens."""


def tokenizer() -> Any:  # Any: a tokenizer of transformers
    """Bytes first, then the words with their own meaning."""
    return byte_tokenizer(
        {},
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<pad>",
        additional_special_tokens=WORDS,
    )


def randomised(module: nn.Module, *, seed: int) -> nn.Module:
    """Weights large enough that every part matters; norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    parts = in_published_parts(dict(module.named_parameters()), expert_stacks(module))
    # Both weights of an expert before those of the next.
    names = {re.sub(r"(\.experts\.\d+)\..*", r"\1", name): None for name in parts}
    with torch.no_grad():
        for name in [each for begin in names for each in parts if each == begin or each.startswith(f"{begin}.")]:
            parameter = parts[name]
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.2 * noise)
            elif "wte" in name or "position_embedding" in name:
                parameter.copy_(0.7 * noise)
            else:
                parameter.copy_(noise * 1.2 / parameter[0].numel() ** 0.5)
    return module


def weights(*, seed: int = 0, config: HunyuanImage3Config = TINY) -> dict[str, Tensor]:
    """By their published names."""
    parts = [randomised(HunyuanImage3Decoder(config.decoder), seed=seed), randomised(ImageParts(config), seed=seed + 1)]
    state = {name: tensor for part in parts for name, tensor in part.state_dict().items()}
    return {name: part.clone() for name, part in in_published_parts(state, expert_stacks(parts[0])).items()}


def config_json(config: HunyuanImage3Config = TINY) -> dict[str, Any]:
    """What `config.json` says of these sizes."""
    decoder, vision, vae = config.decoder, config.vision, config.vae
    return {
        "model_type": "hunyuan_image_3_moe",
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": decoder.num_attention_heads,
        "num_key_value_heads": decoder.num_key_value_heads,
        "attention_head_dim": decoder.head_dim,
        "num_experts": decoder.num_experts,
        "rms_norm_eps": decoder.rms_norm_eps,
        "rope_theta": decoder.rope_theta,
        "max_position_embeddings": decoder.max_position_embeddings,
        "intermediate_size": decoder.layers[0].shared_width,
        "moe_intermediate_size": [layer.expert_width for layer in decoder.layers],
        "num_shared_expert": 1,
        "moe_topk": [layer.top_k for layer in decoder.layers],
        "use_qk_norm": True,
        "use_mixed_mlp_moe": True,
        "image_base_size": config.base_size,
        "patch_embed_hidden_dim": config.patch_width,
        "patch_size": 1,
        "vit": {**vars(vision), "num_patches": vision.patches_per_side**2},
        "vit_processor": {"max_num_patches": config.most_patches},
        "vae": {
            "block_out_channels": list(vae.channels),
            "layers_per_block": vae.blocks,
            "latent_channels": vae.latent_channels,
            "ffactor_spatial": vae.factor,
            "ffactor_temporal": vae.temporal_factor,
            "scaling_factor": vae.scale,
            "shift_factor": None,
        },
    }


def save_hunyuan_image3(
    folder: Path,
    *,
    seed: int = 0,
    style: str = "instruct",
    drops_thoughts: bool = False,
    config: HunyuanImage3Config = TINY,
) -> Path:
    """A folder as published: weights in two files with their index, configurations and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights(seed=seed, config=config)
    files = {name: f"model-{1 + ('layers.1.' in name)}-of-2.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    (folder / "generation_config.json").write_text(
        json.dumps({"sequence_template": style, "drop_think": drops_thoughts})
    )
    tokenizer().save_pretrained(folder)
    return folder
