"""A tiny HunyuanVideo. Any: classes of diffusers and transformers, as in `unirl.models.tiny.text`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unirl.models.extras import from_extra
from unirl.models.hunyuan_video.text import TEMPLATE, TEMPLATE_TOKENS
from unirl.models.tiny.saving import save_random
from unirl.models.tiny.text import clip_config, clip_tokenizer, template_tokenizer

with from_extra("diffusers"):
    import diffusers
    import transformers


def llama_config() -> Any:
    """Four layers, so that the hidden state that is read is neither the first nor the last."""
    return transformers.LlamaConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=256,
    )


def clip_text_model() -> Any:
    """Two layers of width 8."""
    return transformers.CLIPTextModel(clip_config(hidden_size=8, intermediate_size=16, initializer_range=0.2))


def tiny_vae() -> Any:
    """A factor of 8 on a side and 4 in time, as in the real one."""
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=True,
    )


def tiny_transformer(**changes: Any) -> Any:
    """One block of each kind, two heads."""
    fields: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 10,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": 16,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4),
    }
    return diffusers.HunyuanVideoTransformer3DModel(**fields | changes)


def shared_parts(**changes: Any) -> dict[str, Any]:
    """What videos of texts and of images have; changes: of the transformer."""
    return {
        "transformer": tiny_transformer(**changes),
        "vae": tiny_vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "text_encoder_2": clip_text_model(),
        "tokenizer_2": clip_tokenizer(),
    }


def pipeline() -> Any:
    """diffusers' own pipeline of these parts."""
    pipeline_class: Any = diffusers.HunyuanVideoPipeline
    return pipeline_class(
        text_encoder=transformers.LlamaModel(llama_config()),
        tokenizer=template_tokenizer(TEMPLATE.partition("{}")[0], TEMPLATE_TOKENS),
        **shared_parts(),
    )


def write(folder: Path) -> None:
    """A folder of random weights, seed 0."""
    save_random(pipeline, folder)
