"""Tiny parts of Wan 2.1 and 2.2. Any: classes of diffusers and transformers, as in `unirl.models.tiny.text`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unirl.models.extras import from_extra
from unirl.models.tiny.saving import save_random
from unirl.models.tiny.text import t5_tokenizer

with from_extra("diffusers"):
    import diffusers
    import transformers


def tiny_vae(**changes: Any) -> Any:
    """Factors of 8 and 4 as in the real one; four channels of different mean and deviation."""
    fields: dict[str, Any] = {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [1.5, 0.5, 2.0, 1.0],
    }
    return diffusers.AutoencoderKLWan(**fields | changes)


def tiny_transformer(**changes: Any) -> Any:
    """Two layers of two heads."""
    fields: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
        "freq_dim": 64,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return diffusers.WanTransformer3DModel(**fields | changes)


def umt5() -> Any:
    """Two layers of width 32."""
    return transformers.UMT5EncoderModel(
        transformers.UMT5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    )


def shared_parts() -> dict[str, Any]:
    """What every Wan pipeline has besides its transformers."""
    return {
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "vae": tiny_vae(),
        "text_encoder": umt5(),
        "tokenizer": t5_tokenizer(model_max_length=77),
    }


def two_experts() -> Any:
    """diffusers' own pipeline of Wan 2.2 T2V. Of five unshifted levels the first three belong to the first expert."""
    pipeline_class: Any = diffusers.WanPipeline
    experts = {name: tiny_transformer() for name in ("transformer", "transformer_2")}
    return pipeline_class(**experts, **shared_parts(), boundary_ratio=0.875)


def write_two_experts(folder: Path) -> None:
    """A folder of random weights, seed 0."""
    save_random(two_experts, folder)
