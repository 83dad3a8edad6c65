"""A random BAGEL of some 500,000 parameters in the folder layout of the real one, built from its real classes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from unirl.models.bagel.configuration import (
    LANGUAGE_CONFIG,
    MODEL_FILE,
    VAE_FILE,
    VISION_CONFIG,
    BagelConfig,
    LanguageConfig,
    VAEConfig,
)
from unirl.models.bagel.model import Bagel
from unirl.models.bagel.vae import AutoEncoder
from unirl.models.packed.vision import VisionConfig

from .tiny_text import text_tokenizer

TINY = BagelConfig(
    language=LanguageConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=512,
    ),
    vision=VisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        patch_size=14,
        num_channels=3,
        layer_norm_eps=1e-6,
        patches_per_side=8,
    ),
    vae=VAEConfig(channels=32, multipliers=(1, 1, 1, 1), blocks=1),
    max_latent_size=8,
)
"""An image of 32 x 32 pixels has 4 latent tokens of 64 numbers."""


def randomised(module: nn.Module, *, seed: int) -> nn.Module:
    """Weights large enough that every part matters; norms about 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name and name.endswith("weight")
        if is_norm:
            parameter.data = 1 + 0.2 * noise
        elif name.endswith("bias"):
            parameter.data = 0.1 * noise
        elif "embed" in name and "patch" not in name:
            parameter.data = 0.5 * noise
        else:
            parameter.data = noise * 1.5 / parameter[0].numel() ** 0.5
    return module


def save_bagel(folder: Path, *, seed: int = 0, config: BagelConfig = TINY) -> Path:
    """A folder as published: model, autoencoder, configurations and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(randomised(Bagel(config), seed=seed).state_dict(), folder / MODEL_FILE)
    save_file(randomised(AutoEncoder(config.vae), seed=seed + 1).state_dict(), folder / VAE_FILE)
    language, vision = config.language, config.vision
    (folder / LANGUAGE_CONFIG).write_text(json.dumps({"model_type": "qwen2", **vars(language)}))
    (folder / VISION_CONFIG).write_text(
        json.dumps(
            {
                "model_type": "siglip_vision_model",
                **vars(vision),
                # The published code drops the last one, which the file lacks.
                "num_hidden_layers": vision.num_hidden_layers + 1,
                "image_size": vision.patches_per_side * vision.patch_size,
            }
        )
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "bagel", "latent_patch_size": config.latent_patch, "max_latent_size": 4})
    )
    text_tokenizer(chat_template=None).save_pretrained(folder)
    return folder
