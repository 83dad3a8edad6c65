"""A tiny Z-Image. Any: classes of diffusers and transformers, as in `unirl.models.tiny.text`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from unirl.models.extras import from_extra
from unirl.models.tiny.saving import save_random
from unirl.models.tiny.text import chat_bytes, qwen3_text

with from_extra("diffusers"):
    import diffusers


def pipeline() -> Any:
    """Two layers and one of each refiner. Factor and channels of the latents are the released ones, which SGLang takes
    every Z-Image to have."""
    transformer: Any = diffusers.ZImageTransformer2DModel(
        in_channels=16,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=64,
        axes_dims=[16, 8, 8],
        axes_lens=[256, 32, 32],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):  # which the class leaves uninitialised
        torch.nn.init.normal_(token, std=0.02)
    pipeline_class: Any = diffusers.ZImagePipeline
    return pipeline_class(
        transformer=transformer,
        vae=diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            latent_channels=16,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=qwen3_text(),
        tokenizer=chat_bytes(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
    )


def write(folder: Path) -> None:
    """A folder of random weights, seed 0. SGLang calls two of the transformer's sizes otherwise than diffusers, and
    takes the released ones where its own names lack, so the folder has both names."""
    save_random(pipeline, folder)
    path = folder / "transformer" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    both = {**config, "num_layers": config["n_layers"], "num_attention_heads": config["n_heads"]}
    path.write_text(json.dumps(both), encoding="utf-8")
