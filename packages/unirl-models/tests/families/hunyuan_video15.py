"""HunyuanVideo 1.5 as a family of the table."""

from typing import Any

import diffusers
import torch
import transformers

from unirl.models.diffusers_pipeline.references import as_pil
from unirl.models.hunyuan_video15.bundle import HunyuanVideo15Bundle, HunyuanVideo15ImageBundle
from unirl.models.hunyuan_video15.pipeline import HunyuanVideo15ImagePipeline, HunyuanVideo15Pipeline
from unirl.models.hunyuan_video15.text import SYSTEM_PROMPT, TEMPLATE_TOKENS
from unirl.types.media import Images, Primitive

from ..tiny import t5_tokenizer
from ..tiny_text import TEMPLATE
from .kit import Family, Published, Request, seeded, stock_call
from .tiny_parts import byt5, load_lora_by_model, template_tokenizer

CONVERSATION = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"


def qwen_text_model() -> Any:
    """Four layers, so that the hidden state that is read is neither the first nor the last."""
    return transformers.Qwen2_5_VLTextModel(
        transformers.Qwen2_5_VLTextConfig(
            vocab_size=400,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            initializer_range=0.2,
            rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        )
    )


def tiny_vae() -> Any:
    """A factor of 4 on a side (16 in the real one) and 4 in time."""
    return diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )


def tiny_transformer(**changes: Any) -> Any:
    """Two blocks of two heads; nine channels are four of latents, four of given frames and a mask."""
    fields: dict[str, Any] = {
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "text_embed_dim": 16,
        "text_embed_2_dim": 12,
        "image_embed_dim": 12,
        "rope_axes_dim": (2, 2, 4),
        "target_size": 16,
        "task_type": "t2v",
    }
    return diffusers.HunyuanVideo15Transformer3DModel(**fields | changes)


def shared_parts(**changes: Any) -> dict[str, Any]:
    """What both tasks have; changes: of the transformer."""
    tokenizer = template_tokenizer(CONVERSATION, TEMPLATE_TOKENS)
    tokenizer.chat_template = TEMPLATE
    return {
        "text_encoder": qwen_text_model(),
        "tokenizer": tokenizer,
        "transformer": tiny_transformer(**changes),
        "vae": tiny_vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        "text_encoder_2": byt5(),
        "tokenizer_2": t5_tokenizer(),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    }


def tiny() -> Any:
    pipeline_class: Any = diffusers.HunyuanVideo15Pipeline
    return pipeline_class(**shared_parts())


def tiny_i2v() -> Any:
    pipeline_class: Any = diffusers.HunyuanVideo15ImageToVideoPipeline
    encoder = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(
            hidden_size=12,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        )
    )
    extractor = transformers.SiglipImageProcessor(size={"height": 28, "width": 28})
    return pipeline_class(**shared_parts(task_type="i2v"), image_encoder=encoder, feature_extractor=extractor)


def first_frames(num_samples: int) -> dict[str, Primitive]:
    """Of 8 bits. The stock pipeline finds 16 x 16 to be the size nearest in shape."""
    generator = torch.Generator().manual_seed(0)
    return {"image": Images(pixels=torch.randint(0, 256, (num_samples, 3, 24, 28), generator=generator) / 255)}


def arrange(stock: Any, request: Request) -> None:
    """The guider's scale, and lengths that keep the reference quick: it pads everything to them."""
    stock.guider = diffusers.ClassifierFreeGuidance(guidance_scale=request.params.guidance_scale)
    stock.tokenizer_max_length = request.params.max_sequence_length
    stock.tokenizer_2_max_length = 32
    stock.vision_num_semantic_tokens = 9
    stock.vae.enable_slicing()  # the attention of this VAE takes one video at a time


def call(request: Request) -> dict[str, Any]:
    return stock_call(request, guidance=None, num_frames=request.params.num_frames)


def call_i2v(request: Request) -> dict[str, Any]:
    """The size follows from the image."""
    image = request.inputs["image"]
    assert isinstance(image, Images)
    without_size = {name: value for name, value in call(request).items() if name not in ("height", "width")}
    return {**without_size, "image": as_pil(image.pixels[0])}


PARAMS: dict[str, Any] = {"num_frames": 5, "max_sequence_length": 64, "height": 16, "width": 16}

FAMILIES = [
    Family(
        name="hunyuan_video15_t2v",
        bundle=HunyuanVideo15Bundle,
        pipeline=HunyuanVideo15Pipeline,
        tiny=seeded(tiny),
        params=PARAMS,
        other_size={"height": 8, "width": 24, "num_frames": 9},
        call=call,
        arrange=arrange,
        load_lora=load_lora_by_model,
        # The class's defaults are the released sizes.
        published=(Published("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", 8.3, {"transformer": {}}),),
    ),
    Family(
        name="hunyuan_video15_i2v",
        bundle=HunyuanVideo15ImageBundle,
        pipeline=HunyuanVideo15ImagePipeline,
        tiny=seeded(tiny_i2v),
        params=PARAMS,
        other_size={"num_frames": 9},
        inputs=first_frames,
        is_latent_batch=False,
        call=call_i2v,
        arrange=arrange,
        load_lora=load_lora_by_model,
        published=(Published("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v", 8.3, {"transformer": {}}),),
    ),
]
