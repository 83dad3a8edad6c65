"""A random SD3 of about 60,000 parameters in the folder layout of the real one, built from its real classes.

Any stands for classes of diffusers and transformers, which their libraries type as unions with placeholders.
"""

from pathlib import Path
from typing import Any

import diffusers
import torch

from unirl.models.tiny import text
from unirl.models.tiny.images import autoencoder_kl
from unirl.models.tiny.text import clip_encoder, clip_tokenizer, t5_encoder


def byte_tokenizer(first: dict[str, int], **special: str) -> Any:
    """As in `unirl.models.tiny.text`, of texts as long as CLIP's."""
    return text.byte_tokenizer(first, model_max_length=77, **special)


def t5_tokenizer() -> Any:
    """T5's special tokens, then bytes."""
    return text.t5_tokenizer(model_max_length=77)


def tiny_sd3(*, has_t5: bool = True) -> Any:
    """A pipeline of random weights, seed 0: an image of 32 pixels has latents [4, 16, 16] and 64 tokens."""
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=48,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    )
    vae = autoencoder_kl()
    pipeline_class: Any = diffusers.StableDiffusion3Pipeline
    pipeline = pipeline_class(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=clip_encoder(),
        text_encoder_2=clip_encoder(),
        text_encoder_3=t5_encoder() if has_t5 else None,
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        tokenizer_3=t5_tokenizer() if has_t5 else None,
    )
    return _quiet(pipeline)


def load_reference(folder: Path, *, has_t5: bool = True) -> Any:
    """diffusers' own pipeline of a folder."""
    pipeline_class: Any = diffusers.StableDiffusion3Pipeline
    without = {} if has_t5 else {"text_encoder_3": None, "tokenizer_3": None}
    return _quiet(pipeline_class.from_pretrained(folder, **without))


def _quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    return pipeline
