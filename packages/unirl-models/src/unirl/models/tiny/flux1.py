"""A tiny FLUX.1 dev. Any: classes of diffusers and transformers, as in `unirl.models.tiny.text`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unirl.models.extras import from_extra
from unirl.models.tiny.images import autoencoder_kl, dynamic_scheduler
from unirl.models.tiny.saving import save_random
from unirl.models.tiny.text import clip_encoder, clip_tokenizer, t5_encoder, t5_tokenizer

with from_extra("diffusers"):
    import diffusers
    import transformers


def parts(**changes: Any) -> dict[str, Any]:
    """The components of a pipeline: one block of each kind, guidance as an input.

    changes: of the transformer. Weights are of torch's generator, in the order of the keys.
    """
    fields: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 48,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 6, 6),
        "guidance_embeds": True,
    }
    return {
        "scheduler": dynamic_scheduler(),
        "vae": autoencoder_kl(),
        "text_encoder": transformers.CLIPTextModel(clip_encoder().config),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5_encoder(),
        "tokenizer_2": t5_tokenizer(model_max_length=77),
        "transformer": diffusers.FluxTransformer2DModel(**fields | changes),
    }


def pipeline() -> Any:
    """diffusers' own pipeline of these parts."""
    pipeline_class: Any = diffusers.FluxPipeline
    return pipeline_class(**parts())


def kontext() -> Any:
    """That of Kontext, which changes an image."""
    pipeline_class: Any = diffusers.FluxKontextPipeline
    return pipeline_class(**parts())


def fill() -> Any:
    """That of Fill: next to 16 latent channels of a token 16 of the image and 4 x 4 of the mask."""
    pipeline_class: Any = diffusers.FluxFillPipeline
    return pipeline_class(**parts(in_channels=48, out_channels=16))


def write(folder: Path) -> None:
    """A folder of random weights, seed 0."""
    save_random(pipeline, folder)


def write_kontext(folder: Path) -> None:
    """A folder of random weights of Kontext, seed 0."""
    save_random(kontext, folder)


def write_fill(folder: Path) -> None:
    """A folder of random weights of Fill, seed 0."""
    save_random(fill, folder)
