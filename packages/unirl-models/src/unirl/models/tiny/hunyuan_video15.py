"""A tiny HunyuanVideo 1.5. Any: classes of diffusers, as in `unirl.models.tiny.text`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unirl.models.extras import from_extra
from unirl.models.hunyuan_video15.text import SYSTEM_PROMPT, TEMPLATE_TOKENS
from unirl.models.tiny.saving import save_random
from unirl.models.tiny.text import byt5, chat_tokenizer, qwen_text, t5_tokenizer

with from_extra("diffusers"):
    import diffusers
    import transformers


def parts(**changes: Any) -> dict[str, Any]:
    """The components of a pipeline: two blocks of two heads, a factor of 4 on a side (16 in the real one) and in time.

    changes: of the transformer. Weights are of torch's generator, in the order of the keys.
    """
    fields: dict[str, Any] = {
        "in_channels": 9,  # four of latents, four of given frames and a mask
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
    return {
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(**fields | changes),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        "text_encoder": qwen_text(),
        "text_encoder_2": byt5(),
        "tokenizer": chat_tokenizer(SYSTEM_PROMPT, TEMPLATE_TOKENS),
        "tokenizer_2": t5_tokenizer(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    }


def pipeline() -> Any:
    """diffusers' own pipeline of these parts."""
    pipeline_class: Any = diffusers.HunyuanVideo15Pipeline
    return pipeline_class(**parts())


def image_to_video() -> Any:
    """diffusers' own pipeline that begins with an image, which SigLIP reads too."""
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
    return pipeline_class(**parts(task_type="i2v"), image_encoder=encoder, feature_extractor=extractor)


def write(folder: Path) -> None:
    """A folder of random weights, seed 0."""
    save_random(pipeline, folder)


def write_image_to_video(folder: Path) -> None:
    """A folder of random weights that makes videos of images, seed 0."""
    save_random(image_to_video, folder)
