"""LTX-2 and LTX-2.3 as families of the table: video and sound in one latent."""

from typing import Any

import torch
from torch import Tensor

from unirl.models.ltx2.bundle import LTX2Bundle
from unirl.models.ltx2.pipeline import LTX2Pipeline
from unirl.models.ltx23.bundle import LTX23Bundle
from unirl.models.tiny.ltx2 import (
    AUDIO_CHANNELS,
    AUDIO_MOMENTS,
    CHANNELS,
    MEL_BINS,
    SPATIAL,
    TEMPORAL,
    VIDEO_MOMENTS,
    pipeline,
    pipeline_23,
)

from .kit import Family, Published, Request, seeded, stock_call


def parts(latents: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Our latents in parts: video [B, C, f, h, w] and audio [B, A, P, M]."""
    params = request.params
    frames = (params.num_frames - 1) // TEMPORAL + 1
    video = (CHANNELS, frames, params.height // SPATIAL, params.width // SPATIAL)
    size = CHANNELS * frames * video[2] * video[3]
    audio = latents[:, size:].unflatten(1, (AUDIO_CHANNELS, -1, MEL_BINS))
    return latents[:, :size].unflatten(1, video), audio


def packed_audio(audio: Tensor) -> Tensor:
    """[B, P, A M]."""
    return audio.transpose(1, 2).flatten(2)


def call(request: Request) -> dict[str, Any]:
    """With classifier-free guidance alone. Given latents of video are taken as they are, those of audio normalised."""
    params = request.params
    video, audio = parts(request.noise, request)
    mean, std = AUDIO_MOMENTS
    return stock_call(
        request,
        audio_guidance_scale=params.guidance_scale,
        stg_scale=0.0,
        audio_stg_scale=0.0,
        modality_scale=1.0,
        audio_modality_scale=1.0,
        guidance_rescale=0.0,
        audio_guidance_rescale=0.0,
        num_frames=params.num_frames,
        max_sequence_length=params.max_sequence_length,
        latents=video.flatten(2).transpose(1, 2),
        audio_latents=packed_audio(audio) * std + mean,
    )


def from_stock(latents: Any, request: Request) -> Tensor:
    """Any: the pair of video and audio, both as their VAEs take them."""
    del request
    video, audio = latents
    mean, std = (moment.view(1, -1, 1, 1, 1) for moment in VIDEO_MOMENTS)
    audio_mean, audio_std = (moment.view(1, AUDIO_CHANNELS, 1, MEL_BINS) for moment in AUDIO_MOMENTS)
    return torch.cat([((video - mean) / std).flatten(1), ((audio - audio_mean) / audio_std).flatten(1)], dim=1)


SHARED: dict[str, Any] = {
    "pipeline": LTX2Pipeline,
    "params": {"num_frames": 9, "max_sequence_length": 64},
    "other_size": {"height": 32, "width": 64, "num_frames": 17},
    "call": call,
    "from_stock": from_stock,
    "latents_of": lambda outputs: outputs,
    "encodes_media": False,
}

FAMILIES = [
    Family(
        name="ltx2_t2v",
        bundle=LTX2Bundle,
        tiny=seeded(pipeline),
        # The class's defaults are the released sizes.
        published=(Published("Lightricks/LTX-2", 18.9),),
        **SHARED,
    ),
    Family(
        name="ltx23_t2v",
        bundle=LTX23Bundle,
        tiny=seeded(pipeline_23),
        published=(Published("diffusers/LTX-2.3-Diffusers", 19.0),),
        **SHARED,
    ),
]
