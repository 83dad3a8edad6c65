"""Sana as a family of the table."""

from typing import Any

import diffusers
import torch
import transformers

from unirl.models.sana.bundle import SanaBundle
from unirl.models.sana.pipeline import SanaPipeline

from ..tiny import byte_tokenizer
from .kit import Family, Published, Request, seeded, stock_call


def tiny_tokenizer() -> Any:
    """Bytes after Gemma's special tokens. Unlike Gemma's it begins no text with <bos>; both sides count alike."""
    first = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    tokenizer = byte_tokenizer(first, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    tokenizer.model_max_length = 10**6
    return tokenizer


def tiny_vae() -> Any:
    """A factor of 4 instead of 32."""
    kinds = ("ResBlock", "ResBlock", "EfficientViTBlock")
    return diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=kinds,
        decoder_block_types=kinds,
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)),
        upsample_block_type="interpolate",
        downsample_block_type="conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )


def tiny() -> Any:
    torch.manual_seed(0)
    pipeline_class: Any = diffusers.SanaPipeline
    return pipeline_class(
        tokenizer=tiny_tokenizer(),
        text_encoder=transformers.Gemma2Model(
            transformers.Gemma2Config(
                vocab_size=300,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                max_position_embeddings=4096,
            )
        ),
        vae=tiny_vae(),
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=16,
            sample_size=8,
        ),
        # The scheduler of the released folder.
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def call(request: Request) -> dict[str, Any]:
    length = request.params.max_sequence_length
    return stock_call(request, max_sequence_length=length, use_resolution_binning=False)


FAMILIES = [
    Family(
        name="sana",
        bundle=SanaBundle,
        pipeline=SanaPipeline,
        tiny=seeded(tiny),
        params={"max_sequence_length": 24},
        other_size={"height": 64, "width": 32},
        call=call,
        # The class's defaults are the released sizes of the 1.6 B model.
        published=(
            Published("Efficient-Large-Model/Sana_1600M_1024px_diffusers", 1.6),
            Published("Efficient-Large-Model/Sana_600M_1024px_diffusers", 0.59),
        ),
    )
]
