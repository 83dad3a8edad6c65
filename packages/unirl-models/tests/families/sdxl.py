"""SDXL as a family of the table; its stock pipeline walks its own Euler scheduler, in other coordinates."""

from typing import Any

import diffusers
import transformers
from torch import Tensor

from unirl.models.sdxl.bundle import SDXLBundle
from unirl.models.sdxl.pipeline import SDXLPipeline
from unirl.models.tiny.text import clip_encoder, clip_tokenizer

from .kit import Family, Published, seeded, stock_call


def tiny_unet() -> Any:
    """Two levels, the second with attention; told of the size and the pooled text."""
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=32,
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 16,
    )


def tiny() -> Any:
    pooling = clip_encoder()
    pipeline_class: Any = diffusers.StableDiffusionXLPipeline
    return pipeline_class(
        vae=diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=1,
            scaling_factor=0.13025,
        ),
        text_encoder=transformers.CLIPTextModel(pooling.config),
        text_encoder_2=pooling,
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=tiny_unet(),
        # The scheduler of the released folder.
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_schedule="scaled_linear",
            beta_start=0.00085,
            beta_end=0.012,
            timestep_spacing="leading",
            steps_offset=1,
            prediction_type="epsilon",
        ),
        add_watermarker=False,
    )


def levels(scheduler: Any) -> Tensor:
    """Its sigmas are noise over signal."""
    return scheduler.sigmas / (1 + scheduler.sigmas)


FAMILIES = [
    Family(
        name="sdxl",
        bundle=SDXLBundle,
        pipeline=SDXLPipeline,
        tiny=seeded(tiny),
        params={"height": 16, "width": 16},
        other_size={"height": 32, "width": 24},
        call=stock_call,
        keeps_scheduler=True,
        levels=levels,
        published=(Published("stabilityai/stable-diffusion-xl-base-1.0", 2.57, components=("unet",)),),
    )
]
