"""A tiny LTX-2 and LTX-2.3: video and sound in one latent. Any: classes of diffusers and transformers, as in
`unirl.models.tiny.text`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.models.extras import from_extra
from unirl.models.tiny.images import dynamic_scheduler
from unirl.models.tiny.saving import save_random
from unirl.models.tiny.text import byte_tokenizer

with from_extra("diffusers"):
    import diffusers
    import transformers
    from diffusers.pipelines.ltx2 import vocoder as vocoders
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

CHANNELS, AUDIO_CHANNELS, MEL_BINS = 8, 2, 4
"""Sizes of latents."""
SPATIAL, TEMPORAL, AUDIO_PER_SECOND, FPS = 8, 8, 25, 24
VIDEO_MOMENTS = torch.linspace(-0.3, 0.4, CHANNELS), torch.linspace(0.5, 2.0, CHANNELS)
AUDIO_MOMENTS = (
    torch.linspace(0.2, -0.2, AUDIO_CHANNELS * MEL_BINS),
    torch.linspace(1.5, 0.7, AUDIO_CHANNELS * MEL_BINS),
)


_VOCODER: dict[str, Any] = {
    "in_channels": 8 * MEL_BINS,
    "hidden_channels": 16,
    "upsample_kernel_sizes": [4, 4],
    "upsample_factors": [2, 2],
    "resnet_kernel_sizes": [3],
    "resnet_dilations": [[1, 3]],
}
_UPSAMPLE_23 = ("spatiotemporal", "spatiotemporal", "temporal", "spatial")


def gemma() -> Any:
    """Two layers of width 16."""
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config={
                "vocab_size": 300,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "initializer_range": 0.2,
            },
            vision_config={
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 28,
                "patch_size": 14,
            },
            mm_tokens_per_image=4,
            image_token_index=299,
            boi_token_index=298,
            eoi_token_index=297,
        )
    )


def connectors(**changes: Any) -> Any:
    """One layer for each stream; eight registers stand for the padding."""
    stream = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": 8}
    both: dict[str, Any] = {
        f"{name}_connector_{key}": value for name in ("video", "audio") for key, value in stream.items()
    }
    return LTX2TextConnectors(caption_channels=16, text_proj_in_factor=3, **both | changes)


def _with_moments(vae: Any, moments: tuple[Tensor, Tensor]) -> Any:
    vae.latents_mean.copy_(moments[0])
    vae.latents_std.copy_(moments[1])
    return vae


def tiny_vae(**changes: Any) -> Any:
    """Factors of 8 on a side (32 in the real one) and 8 in time."""
    fields: dict[str, Any] = {
        "latent_channels": CHANNELS,
        "block_out_channels": (8, 16, 32, 64),
        "decoder_block_out_channels": (8, 16, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1),
        "patch_size": 1,
        "spatial_compression_ratio": SPATIAL,
        "temporal_compression_ratio": TEMPORAL,
    }
    return _with_moments(diffusers.AutoencoderKLLTX2Video(**fields | changes), VIDEO_MOMENTS)


def tiny_audio_vae() -> Any:
    """Sixteen mel bins, four in a latent."""
    vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=AUDIO_CHANNELS * MEL_BINS, num_res_blocks=1, latent_channels=AUDIO_CHANNELS, mel_bins=4 * MEL_BINS
    )
    return _with_moments(vae, AUDIO_MOMENTS)


def tiny_vocoder() -> Any:
    """Two channels at 400 samples per second."""
    return vocoders.LTX2Vocoder(**_VOCODER, output_sampling_rate=400)


def tiny_vocoder_23() -> Any:
    """Two channels at 400 samples per second, extended to 800. Its transforms, which are buffers, are random."""
    size = {"filter_length": 8, "hop_length": 4, "window_length": 8, "num_mel_channels": 4}
    bwe = {**_VOCODER, "in_channels": 8, "upsample_kernel_sizes": [8, 4], "upsample_factors": [4, 2]}
    extended = {f"bwe_{key}": value for key, value in bwe.items()}
    made: Any = vocoders.LTX2VocoderWithBWE(
        **_VOCODER, **extended, **size, input_sampling_rate=400, output_sampling_rate=800
    )
    made.mel_stft.stft_fn.forward_basis.normal_(std=0.3)
    made.mel_stft.mel_basis.uniform_(0.0, 1.0)
    return made


def tiny_transformer(**changes: Any) -> Any:
    """Two blocks of two heads."""
    fields: dict[str, Any] = {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "vae_scale_factors": (TEMPORAL, SPATIAL, SPATIAL),
        "audio_in_channels": AUDIO_CHANNELS * MEL_BINS,
        "audio_out_channels": AUDIO_CHANNELS * MEL_BINS,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": 2,
        "caption_channels": 16,
    }
    return diffusers.LTX2VideoTransformer3DModel(**fields | changes)


def pipeline() -> Any:
    """diffusers' own pipeline of these parts."""
    return _pipeline(vae=tiny_vae(), connectors=connectors(), transformer=tiny_transformer(), vocoder=tiny_vocoder())


def pipeline_23() -> Any:
    """The same of LTX-2.3, in what its released configuration sets."""
    return _pipeline(
        vae=tiny_vae(
            block_out_channels=(8, 16, 32, 32),
            decoder_block_out_channels=(8, 16, 16, 32),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            decoder_spatio_temporal_scaling=(True,) * 4,
            decoder_inject_noise=(False,) * 5,
            upsample_type=_UPSAMPLE_23,
            upsample_residual=(False,) * 4,
            upsample_factor=(2, 2, 1, 2),
            decoder_spatial_padding_mode="zeros",
        ),
        connectors=connectors(
            video_connector_attention_head_dim=16,
            video_gated_attn=True,
            audio_gated_attn=True,
            rope_type="split",
            per_modality_projections=True,
            video_hidden_dim=32,
            audio_hidden_dim=16,
            proj_bias=True,
        ),
        transformer=tiny_transformer(
            gated_attn=True,
            cross_attn_mod=True,
            audio_gated_attn=True,
            audio_cross_attn_mod=True,
            rope_type="split",
            use_prompt_embeddings=False,
            perturbed_attn=True,
        ),
        vocoder=tiny_vocoder_23(),
    )


def _pipeline(**parts: Any) -> Any:
    pipeline_class: Any = diffusers.LTX2Pipeline
    return pipeline_class(
        scheduler=dynamic_scheduler(
            base_image_seq_len=1024, max_image_seq_len=4096, base_shift=0.95, max_shift=2.05, shift_terminal=0.1
        ),
        audio_vae=tiny_audio_vae(),
        text_encoder=gemma(),
        tokenizer=byte_tokenizer({}, eos_token="<|im_end|>", pad_token="<|endoftext|>"),
        **parts,
    )


def write(folder: Path) -> None:
    """A folder of random weights, seed 0."""
    save_random(pipeline, folder)
