"""MiniMax-H3 as a family of the table: video and sound in one latent, against the library's pipeline of blocks."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor
from transformers import Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from unirl.models.minimax_h3.bundle import MiniMaxH3Bundle
from unirl.models.minimax_h3.pipeline import MiniMaxH3Pipeline
from unirl.models.tiny.minimax_h3 import AUDIO_CHANNELS, CHANNELS, SHIFTS, SPATIAL, components

from .kit import Family, Published, Request, seeded

RATIO = SHIFTS[0] / SHIFTS[1]
"""Our latents of sound over the model's, when nothing is left of the noise."""


class TextProcessor(Qwen3VLProcessor):
    """The real processor without its part for videos, which needs torchvision and is never asked."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


STOCK: Any = diffusers.MiniMaxH3ModularPipeline


class MiniMaxH3ModularPipeline(STOCK):
    """The library's, for videos of any length, called as other stock pipelines are."""

    @property
    def min_duration(self) -> float:
        return 0.0

    def __call__(self, *, num_inference_steps: int, output_type: str, return_dict: bool = True, **call: Any) -> Any:
        """Its number of steps counts the levels."""
        del return_dict
        is_latent = output_type == "latent"
        state = super().__call__(
            num_inference_steps=num_inference_steps + 1, output_type="pt" if is_latent else output_type, **call
        )
        names = ("latents", "audio_latents") if is_latent else ("videos", "audio")
        return tuple(state.get(name) for name in names)

    def save_pretrained(self, folder: Path, **keywords: Any) -> None:
        super().save_pretrained(str(folder), **keywords)


def tiny() -> Any:
    pipeline = MiniMaxH3ModularPipeline()
    pipeline.update_components(**components())
    return pipeline


def stock(folder: Path) -> Any:
    """Its index says where the components were saved, which was under another name."""
    pipeline = MiniMaxH3ModularPipeline(pretrained_model_name_or_path=str(folder), workflow="t2va")
    names = [name for name in components() if name != "processor"]
    pipeline.load_components(names=names, pretrained_model_name_or_path=str(folder))
    pipeline.update_components(processor=TextProcessor(Qwen2VLImageProcessorPil(), pipeline.tokenizer))
    return pipeline


def parts(latents: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Our latents in parts: video [B, C, f, h, w] and sound [B, 2, P, M]."""
    params = request.params
    frames = (params.num_frames - 5) // 17 * 5 + 2
    video = (CHANNELS, frames, params.height // SPATIAL, params.width // SPATIAL)
    size = CHANNELS * frames * video[2] * video[3]
    return latents[:, :size].unflatten(1, video), latents[:, size:].unflatten(1, (2, -1, AUDIO_CHANNELS))


def call(request: Request) -> dict[str, Any]:
    """One prompt."""
    params = request.params
    video, audio = parts(request.noise, request)
    [prompt] = request.texts[:1]
    return {
        "prompt": prompt,
        "height": params.height,
        "width": params.width,
        "num_frames": params.num_frames,
        "latents": video[:1].clone(),
        "audio_latents": audio[0].transpose(1, 2).clone(),
    }


def from_stock(latents: Any, request: Request) -> Tensor:
    """Any: the pair of video [1, C, f, h, w] and sound [2, M, P], both as the model has them."""
    del request
    video, audio = latents
    return torch.cat([video.flatten(1), RATIO * audio.transpose(1, 2).reshape(1, -1)], dim=1)


FAMILIES = [
    Family(
        name="minimax_h3_t2v",
        bundle=MiniMaxH3Bundle,
        pipeline=MiniMaxH3Pipeline,
        tiny=seeded(tiny),
        params={"num_frames": 22, "guidance_scale": 1.0, "negative_prompt": None},
        options={"shortest_s": 0.0},
        unguided=None,
        tile=None,
        other_size={"height": 32, "width": 48, "num_frames": 39},
        call=call,
        from_stock=from_stock,
        latents_of=lambda outputs: outputs,
        encodes_media=False,
        is_latent_batch=False,
        keeps_scheduler=True,
        stock=stock,
        # The class's defaults are the released sizes.
        published=(Published("MiniMaxAI/MiniMax-H3", 33.1),),
    ),
]
