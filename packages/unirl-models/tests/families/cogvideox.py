"""CogVideoX as a family of the table: added positions (2B), rotary ones (5B), two latent frames in a token (1.5)."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor

from unirl.models.cogvideox.bundle import CogVideoXBundle
from unirl.models.cogvideox.pipeline import CogVideoXPipeline
from unirl.models.tiny.text import t5_encoder
from unirl.sde.variance_preserving import sigma_of

from ..tiny import t5_tokenizer
from .kit import Family, Published, Request, seeded, stock_call

TOKENS = 16


def tiny(snr_shift_scale: float, **changes: Any) -> Callable[[], Any]:
    """One layer. The scheduler is the released one, with the spacing whose steps meet, see `unirl.sde.timesteps`."""

    def make() -> Any:
        fields: dict[str, Any] = {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 48,
            "num_layers": 2,
            "sample_width": 4,
            "sample_height": 4,
            "sample_frames": 9,
            "max_text_seq_length": TOKENS,
        }
        pipeline_class: Any = diffusers.CogVideoXPipeline
        return pipeline_class(
            tokenizer=t5_tokenizer(),
            text_encoder=t5_encoder(),
            vae=diffusers.AutoencoderKLCogVideoX(
                down_block_types=("CogVideoXDownBlock3D",) * 4,
                up_block_types=("CogVideoXUpBlock3D",) * 4,
                block_out_channels=(8, 8, 8, 8),
                latent_channels=4,
                layers_per_block=1,
                norm_num_groups=2,
                scaling_factor=0.7,
            ),
            transformer=diffusers.CogVideoXTransformer3DModel(**fields | changes),
            scheduler=diffusers.CogVideoXDDIMScheduler(
                clip_sample=False,
                prediction_type="v_prediction",
                timestep_spacing="trailing",
                rescale_betas_zero_snr=True,
                snr_shift_scale=snr_shift_scale,
            ),
        )

    return seeded(make)


def call(request: Request) -> dict[str, Any]:
    latents = request.noise.transpose(1, 2).clone()
    return stock_call(request, num_frames=request.params.num_frames, max_sequence_length=TOKENS, latents=latents)


def from_stock(latents: Tensor, request: Request) -> Tensor:
    return latents.transpose(1, 2)


def levels(scheduler: Any) -> Tensor:
    """Levels of its timesteps, and 0."""
    return torch.cat([sigma_of(scheduler.alphas_cumprod)[scheduler.timesteps], torch.zeros(1)])


def family(name: str, num_frames: int, tiny: Callable[[], Any], *published: Published) -> Family:
    """The three differ in their transformers and in the shift of their levels."""
    return Family(
        name=name,
        bundle=CogVideoXBundle,
        pipeline=CogVideoXPipeline,
        tiny=tiny,
        params={"num_frames": num_frames},
        other_size={"height": 16, "width": 48},
        call=call,
        from_stock=from_stock,
        keeps_scheduler=True,
        levels=levels,
        published=published,
    )


ROTARY = {"use_rotary_positional_embeddings": True}
PADDED_TIME = {"patch_size_t": 2, "patch_bias": False, **ROTARY}

FAMILIES = [
    family("cogvideox", 9, tiny(3.0), Published("zai-org/CogVideoX-2b", 1.69)),
    family("cogvideox_rotary", 9, tiny(1.0, **ROTARY), Published("zai-org/CogVideoX-5b", 5.57)),
    family(
        "cogvideox15",
        9,
        tiny(1.0, **PADDED_TIME, sample_height=20, sample_width=20),
        Published("zai-org/CogVideoX1.5-5B", 5.57),
    ),
]
