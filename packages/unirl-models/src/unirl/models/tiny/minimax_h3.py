"""A tiny MiniMax-H3 in the folder of a pipeline of blocks. Any: classes of diffusers and transformers, as in
`unirl.models.tiny.text`."""

from __future__ import annotations

from typing import Any

from unirl.models.extras import from_extra
from unirl.models.minimax_h3.text import LAYER
from unirl.models.tiny.text import byte_tokenizer

with from_extra("diffusers"):
    import diffusers
    import transformers

CHANNELS, AUDIO_CHANNELS = 8, 4
"""Sizes of latents."""
SPATIAL, SAMPLE_RATE = 8, 160
VIDEO_MOMENTS = [0.1 * place - 0.3 for place in range(CHANNELS)], [0.5 + 0.2 * place for place in range(CHANNELS)]
AUDIO_MOMENTS = [0.2, -0.1, 0.0, 0.3], [1.5, 0.7, 1.0, 0.8]
SHIFTS = 12.0, 3.0
"""Schedules of video and sound have these, as released."""


def text_encoder() -> Any:
    """One layer more than the transformer reads, of width 16."""
    text: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": LAYER + 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "rope_theta": 1e4,
        },
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 1,
        "patch_size": 4,
        "out_hidden_size": 16,
        "num_position_embeddings": 4,
        "deepstack_visual_indexes": [0],
    }
    ids: dict[str, Any] = {
        name: 296 + place
        for place, name in enumerate(
            ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        )
    }
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    )


def vae() -> Any:
    """A factor of 8 on a side (16 in the real one) and the real one's chunks of 17 frames."""
    return diffusers.AutoencoderKLMiniMaxH3(
        latent_channels=CHANNELS,
        block_out_channels=(8, 8, 16),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 2),
        temporal_downsample_factors=(1, 2, 2),
        norm_num_groups=2,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        decoder_ffn_mult=2,
        latents_mean=tuple(VIDEO_MOMENTS[0]),
        latents_std=tuple(VIDEO_MOMENTS[1]),
    )


def audio_vae() -> Any:
    """Four samples per latent, forty latents per second."""
    return diffusers.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        encoder_rates=(2, 2),
        latent_dim=16,
        latent_channels=AUDIO_CHANNELS,
        num_attention_heads=2,
        decoder_dim=16,
        decoder_rates=(2, 2),
        decoder_kernel_sizes=(4, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3),),
        sampling_rate=SAMPLE_RATE,
        latents_mean=AUDIO_MOMENTS[0],
        latents_std=AUDIO_MOMENTS[1],
    )


def transformer() -> Any:
    """Two blocks of two heads, one block that refines the text."""
    return diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=32,
        in_channels=CHANNELS,
        audio_in_channels=AUDIO_CHANNELS,
        text_dim=16,
        freq_dim=32,
        time_embed_hidden_dim=24,
        time_embed_dim=16,
        rope_freq_dim=2,
    )


def components() -> dict[str, Any]:
    """What a folder has, by component, but for the processor of images, which texts alone do not pass."""
    scheduler: Any = diffusers.MiniMaxH3Scheduler
    return {
        "scheduler": scheduler(shift=SHIFTS[0]),
        "audio_scheduler": scheduler(shift=SHIFTS[1]),
        "vae": vae(),
        "audio_vae": audio_vae(),
        "text_encoder": text_encoder(),
        "tokenizer": byte_tokenizer({}, eos_token="<|im_end|>", pad_token="<|endoftext|>"),
        "transformer": transformer(),
    }
