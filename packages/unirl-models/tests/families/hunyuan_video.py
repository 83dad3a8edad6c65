"""HunyuanVideo as a family of the table."""

from typing import Any

import diffusers
import transformers

from unirl.models.hunyuan_video.bundle import HunyuanVideoBundle
from unirl.models.hunyuan_video.pipeline import HunyuanVideoPipeline
from unirl.models.hunyuan_video.text import TEMPLATE, TEMPLATE_TOKENS

from ..tiny import clip_tokenizer
from .kit import Family, Published, Request, seeded
from .tiny_parts import template_tokenizer


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
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=300,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=77,
            bos_token_id=256,
            eos_token_id=257,
            pad_token_id=257,
            initializer_range=0.2,
        )
    )


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


def tiny() -> Any:
    pipeline_class: Any = diffusers.HunyuanVideoPipeline
    return pipeline_class(
        text_encoder=transformers.LlamaModel(llama_config()),
        tokenizer=template_tokenizer(TEMPLATE.partition("{}")[0], TEMPLATE_TOKENS),
        transformer=tiny_transformer(),
        vae=tiny_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=clip_text_model(),
        tokenizer_2=clip_tokenizer(),
    )


def call(request: Request) -> dict[str, Any]:
    params = request.params
    return {
        "prompt": request.texts,
        "negative_prompt": request.negative,
        "true_cfg_scale": params.guidance_scale,
        "guidance_scale": params.distilled_guidance_scale,
        "height": params.height,
        "width": params.width,
        "num_frames": params.num_frames,
        "latents": request.noise.clone(),
    }


PARAMS: dict[str, Any] = {"distilled_guidance_scale": 6.0, "num_frames": 5}

FAMILIES = [
    Family(
        name="hunyuan_video",
        bundle=HunyuanVideoBundle,
        pipeline=HunyuanVideoPipeline,
        tiny=seeded(tiny),
        params=PARAMS,
        other_size={"height": 16, "width": 48, "num_frames": 9},
        call=call,
        # The class's defaults are the released sizes.
        published=(Published("hunyuanvideo-community/HunyuanVideo", 12.8, {"transformer": {}}),),
    ),
]
