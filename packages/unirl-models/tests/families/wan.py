"""Wan 2.1 and 2.2 as families of the table.

Sampling agrees because both sides walk pinned float levels; the stock scheduler cuts its timesteps to integers.
"""

from pathlib import Path
from typing import Any

import diffusers
import transformers

from unirl.models.wan.bundle import WanBundle
from unirl.models.wan.pipeline import WanPipeline

from ..tiny import t5_tokenizer
from .kit import Family, Published, Request, seeded

PARAMS = {"num_frames": 5, "max_sequence_length": 32}
OTHER_SIZE = {"height": 32, "width": 48, "num_frames": 9}
WAN_1_3B = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
WAN_5B = {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48}


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
    """What every Wan pipeline has beside its transformers."""
    return {
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "vae": tiny_vae(),
        "text_encoder": umt5(),
        "tokenizer": t5_tokenizer(),
    }


def tiny_t2v(**changes: Any) -> Any:
    pipeline_class: Any = diffusers.WanPipeline
    return pipeline_class(transformer=tiny_transformer(), **{**shared_parts(), **changes})


def tiny_two_experts() -> Any:
    # Of five unshifted levels the first three belong to the first expert.
    return tiny_t2v(transformer_2=tiny_transformer(), boundary_ratio=0.875)


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


def tiny_ti2v() -> Any:
    return tiny_t2v(vae=tiny_vae_16(), expand_timesteps=True)


def call(request: Request) -> dict[str, Any]:
    params = request.params
    return {
        "prompt": request.texts,
        "negative_prompt": request.negative,
        "guidance_scale": params.guidance_scale,
        "height": params.height,
        "width": params.width,
        "num_frames": params.num_frames,
        "guidance_scale_2": params.guidance_scale_2,
        "max_sequence_length": params.max_sequence_length,
        "latents": request.noise.clone(),
    }


def load_two_loras(stock: Any, folder: Path) -> None:
    stock.load_lora_weights(str(folder))
    stock.load_lora_weights(str(folder / "transformer_2"), load_into_transformer_2=True)


FAMILIES = [
    Family(
        name="wan21_t2v",
        bundle=WanBundle,
        pipeline=WanPipeline,
        tiny=seeded(tiny_t2v),
        params=PARAMS,
        other_size=OTHER_SIZE,
        call=call,
        published=(
            # Called 1.3B.
            Published("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 1.42, {"transformer": WAN_1_3B}),
            # The class's defaults are the released sizes.
            Published("Wan-AI/Wan2.1-T2V-14B-Diffusers", 14.3, {"transformer": {}}),
        ),
    ),
    Family(
        name="wan22_t2v",
        bundle=WanBundle,
        pipeline=WanPipeline,
        tiny=seeded(tiny_two_experts),
        params=PARAMS | {"guidance_scale_2": 2.0},
        other_size=OTHER_SIZE,
        unguided={"guidance_scale": 1.0, "guidance_scale_2": None},
        call=call,
        load_lora=load_two_loras,
        # Called A14B: 14 active of 28.
        published=(Published("Wan-AI/Wan2.2-T2V-A14B-Diffusers", 28.6, {"transformer": {}, "transformer_2": {}}),),
    ),
    Family(
        name="wan22_ti2v",
        bundle=WanBundle,
        pipeline=WanPipeline,
        tiny=seeded(tiny_ti2v),
        params=PARAMS,
        other_size={"height": 64, "width": 32, "num_frames": 9},
        call=call,
        published=(Published("Wan-AI/Wan2.2-TI2V-5B-Diffusers", 5.0, {"transformer": WAN_5B}),),
    ),
]
