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


def tiny_vae_16() -> Any:
    """A factor of 16 by patches of two pixels and residual blocks, as in the VAE of TI2V-5B."""
    return tiny_vae(
        in_channels=12,
        out_channels=12,
        patch_size=2,
        is_residual=True,
        scale_factor_spatial=16,
        decoder_base_dim=4,
    )


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


CLIP_TOKENS = 257
"""Number of the features of an image, which SGLang takes for granted."""


def clip(model_class: Any) -> dict[str, Any]:
    """Features [CLIP_TOKENS, 8] of an image of any size, by the class that a release names."""
    config = transformers.CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=2,
        projection_dim=8,
    )
    return {
        "image_encoder": model_class(config),
        "image_processor": transformers.CLIPImageProcessor(crop_size=32, size=32),
    }


def image_to_video(**changes: Any) -> Any:
    """diffusers' own pipeline of one transformer that reads given frames as channels."""
    pipeline_class: Any = diffusers.WanImageToVideoPipeline
    return pipeline_class(
        **{"transformer": tiny_transformer(in_channels=12), **shared_parts(), "image_encoder": None, **changes}
    )


def image_to_video_clip(**changes: Any) -> Any:
    """That of Wan 2.1, which reads features of the images too."""
    transformer = tiny_transformer(in_channels=12, image_dim=8, added_kv_proj_dim=24, **changes)
    return image_to_video(transformer=transformer, **clip(transformers.CLIPVisionModelWithProjection))


def image_to_video_experts() -> Any:
    """That of Wan 2.2, whose first of five unshifted levels belongs to the first expert."""
    experts = {name: tiny_transformer(in_channels=12) for name in ("transformer", "transformer_2")}
    return image_to_video(**experts, boundary_ratio=0.9)


def image_to_video_first_frame() -> Any:
    """That of Wan 2.2 TI2V-5B, whose first latent frame is the image itself."""
    return image_to_video(transformer=tiny_transformer(), vae=tiny_vae_16(), expand_timesteps=True)


def write_image_to_video(folder: Path) -> None:
    """A folder of random weights of Wan 2.1, seed 0."""
    save_random(image_to_video_clip, folder)


def write_image_to_video_experts(folder: Path) -> None:
    """A folder of random weights of Wan 2.2, seed 0."""
    save_random(image_to_video_experts, folder)


def write_image_to_video_first_frame(folder: Path) -> None:
    """A folder of random weights of Wan 2.2 TI2V-5B, seed 0."""
    save_random(image_to_video_first_frame, folder)


def write_two_experts(folder: Path) -> None:
    """A folder of random weights, seed 0."""
    save_random(two_experts, folder)
