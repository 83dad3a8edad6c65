"""FLUX.2 Klein as a family of the table."""

from typing import Any

import diffusers
import torch
from torch import Tensor

from unirl.models.flux2_klein.bundle import Flux2KleinBundle
from unirl.models.flux2_klein.pipeline import Flux2KleinPipeline
from unirl.models.tiny.images import dynamic_scheduler
from unirl.types.media import ImageLists

from ..tiny_text import qwen3, text_tokenizer
from .kit import Family, Published, Request, seeded
from .tiny_parts import pictures, to_pil

MEANS = torch.linspace(-0.3, 0.3, 16)
VARIANCES = torch.linspace(0.5, 2.0, 16)
EPSILON = 1e-4


def tiny_vae() -> Any:
    """A factor of 2, statistics of its patches that differ from channel to channel."""
    vae: Any = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        sample_size=32,
        batch_norm_eps=EPSILON,
    )
    vae.bn.running_mean.copy_(MEANS)
    vae.bn.running_var.copy_(VARIANCES)
    return vae


def tiny(**changes: Any) -> Any:
    """As many layers of text as the real one reads, one block of each kind."""
    pipeline_class: Any = diffusers.Flux2KleinPipeline
    return pipeline_class(
        scheduler=dynamic_scheduler(),
        vae=tiny_vae(),
        text_encoder=qwen3(
            num_hidden_layers=28,
            hidden_size=16,
            intermediate_size=24,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        ),
        tokenizer=text_tokenizer(),
        transformer=tiny_transformer(guidance_embeds=False),
        **changes,
    )


def tiny_transformer(*, guidance_embeds: bool) -> Any:
    """One block of each kind; texts of three layers of width 16."""
    return diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )


def call(request: Request) -> dict[str, Any]:
    params = request.params
    return {
        "prompt": request.texts,
        "guidance_scale": params.guidance_scale,
        "height": params.height,
        "width": params.width,
        "max_sequence_length": params.max_sequence_length,
        "latents": request.noise,
    }


def from_stock(latents: Tensor, request: Request) -> Tensor:
    """The stock pipeline returns what the VAE decodes."""
    patches = torch.nn.functional.pixel_unshuffle(latents, 2)
    return (patches - MEANS[:, None, None]) / (VARIANCES + EPSILON).sqrt()[:, None, None]


# The stock pipeline has no other negative prompt.
PARAMS = {"max_sequence_length": 64, "negative_prompt": ""}


PUBLISHED = (
    Published("black-forest-labs/FLUX.2-klein-base-4B", 3.88),
    Published("black-forest-labs/FLUX.2-klein-base-9B", 9.08),
)


def edit_call(request: Request) -> dict[str, Any]:
    images = request.inputs["image"]
    assert isinstance(images, ImageLists)
    return {**call(request), "image": [to_pil(picture) for picture in images.images[0]]}


FAMILIES = [
    Family(
        name="flux2_klein",
        bundle=Flux2KleinBundle,
        pipeline=Flux2KleinPipeline,
        tiny=seeded(tiny),
        params=PARAMS,
        call=call,
        from_stock=from_stock,
        published=PUBLISHED,
    ),
    Family(
        name="flux2_klein_edit",
        bundle=Flux2KleinBundle,
        pipeline=Flux2KleinPipeline,
        tiny=seeded(tiny),
        params=PARAMS,
        call=edit_call,
        from_stock=from_stock,
        inputs=pictures,
        is_latent_batch=False,
    ),
]
