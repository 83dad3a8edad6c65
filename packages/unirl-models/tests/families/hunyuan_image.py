"""HunyuanImage 2.1 as a family of the table.

The guider's adaptive part is put after the last step: what stands before it is classifier-free guidance.
"""

from typing import Any

import diffusers

from unirl.models.hunyuan_image.bundle import HunyuanImageBundle
from unirl.models.hunyuan_image.pipeline import HunyuanImagePipeline
from unirl.models.hunyuan_image.text import TEMPLATE, TEMPLATE_TOKENS
from unirl.models.tiny.text import byt5, template_tokenizer

from ..tiny import t5_tokenizer
from ..tiny_text import qwen_vl, text_tokenizer
from .kit import Family, Published, Request, seeded, stock_call
from .tiny_parts import load_lora_by_model


def tiny_vae() -> Any:
    """A factor of 8 on a side (32 in the real one)."""
    return diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=64,
        scaling_factor=0.75,
        downsample_match_channel=True,
        upsample_match_channel=True,
    )


def tiny_transformer(**changes: Any) -> Any:
    """One block of each kind, two heads."""
    fields: dict[str, Any] = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": 64,
        "text_embed_2_dim": 12,
        "rope_axes_dim": (4, 4),
    }
    return diffusers.HunyuanImageTransformer2DModel(**fields | changes)


def tiny(**changes: Any) -> Any:
    pipeline_class: Any = diffusers.HunyuanImagePipeline
    return pipeline_class(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=tiny_vae(),
        # Four layers, so that the hidden state that is read is neither the first nor the last.
        text_encoder=qwen_vl("qwen2_5_vl", num_hidden_layers=4, vocab_size=320),
        tokenizer=template_tokenizer(TEMPLATE.partition("{}")[0], TEMPLATE_TOKENS, tokenizer=text_tokenizer()),
        text_encoder_2=byt5(),
        tokenizer_2=t5_tokenizer(),
        transformer=tiny_transformer(**changes),
        guider=diffusers.AdaptiveProjectedMixGuidance(),
        ocr_guider=diffusers.AdaptiveProjectedMixGuidance(),
    )


def arrange(stock: Any, request: Request) -> None:
    """Classifier-free guidance at every step, and lengths that keep the reference quick: it pads everything to them."""
    stock.guider = stock.ocr_guider = diffusers.AdaptiveProjectedMixGuidance(
        guidance_scale=request.params.guidance_scale, adaptive_projected_guidance_start_step=100
    )
    stock.tokenizer_max_length = request.params.max_sequence_length
    stock.tokenizer_2_max_length = 32


def call(request: Request) -> dict[str, Any]:
    scale = request.params.distilled_guidance_scale
    return stock_call(request, guidance=None, distilled_guidance_scale=scale)


PARAMS: dict[str, Any] = {"max_sequence_length": 64}

FAMILIES = [
    Family(
        name="hunyuan_image21",
        bundle=HunyuanImageBundle,
        pipeline=HunyuanImagePipeline,
        tiny=seeded(tiny),
        params=PARAMS,
        other_size={"height": 24, "width": 48},
        call=call,
        arrange=arrange,
        load_lora=load_lora_by_model,
        published=(
            # The class's defaults are the released sizes, but for the words to draw.
            Published("hunyuanvideo-community/HunyuanImage-2.1-Diffusers", 17.4),
        ),
    ),
]
