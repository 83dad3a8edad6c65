"""What SGLang's /generate is sent. Pure functions, written against sglang.srt.managers.io_struct of 0.5.23."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from unirl.rollout.engine.served_text import Generate
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import ImageLists, Images, Primitive


@dataclass(frozen=True)
class PromptImages:
    """The images of prompts as SGLang takes them."""

    images: list[list[str]]
    """PNG files as data URIs, in the order of each prompt."""
    placeholder: int
    """The token that stands for one merged patch; SGLang repeats it as often as the image has patches."""

    def __post_init__(self) -> None:
        if not any(self.images):
            raise ContractError("prompts without a single image are sent without images")


def data_uris(images: Primitive) -> list[list[str]]:
    """Images, one a sample, or ImageLists in 8 bits, as the adapters of the models round them. Equal tensors are
    encoded once. Raises ConfigError for anything else."""
    if isinstance(images, Images):
        samples = [[pixels] for pixels in images.in_floats().pixels]
    elif isinstance(images, ImageLists):
        samples = images.images
    else:
        raise ConfigError(f"the slot 'image' must hold Images or ImageLists, got {type(images).__name__}")
    known: dict[int, str] = {}
    return [[known.get(id(p)) or known.setdefault(id(p), _data_uri(p)) for p in sample] for sample in samples]


def _data_uri(pixels: Tensor) -> str:
    array = (pixels.clamp(0, 1) * 255).round().to("cpu", torch.uint8).permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(array).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def one_placeholder_each(prompt: Sequence[int], placeholder: int) -> list[int]:
    """The prompt with every run of placeholders, which is one image, made one placeholder."""
    return [
        token
        for place, token in enumerate(prompt)
        if token != placeholder or place == 0 or prompt[place - 1] != placeholder
    ]


def payload(call: Generate, adapter: str | None, images: PromptImages | None = None) -> dict[str, Any]:  # Any: JSON
    """The body of one /generate for all prompts.

    Raises ConfigError for top-p or top-k: SGLang reports log-probs of the whole softmax, not of what it drew from.
    """
    if call.temperature > 0 and (call.top_p < 1 or call.top_k > 0):
        raise ConfigError(
            f"SGLang's log-probs are of the whole softmax, but top_p = {call.top_p} and top_k = {call.top_k} draw from "
            "a part of it. Set sampling.top_p: 1 and sampling.top_k: 0."
        )
    return {
        "rid": [f"{call.number}-{row}" for row in range(len(call.prompts))],
        "input_ids": call.prompts
        if images is None
        else [one_placeholder_each(prompt, images.placeholder) for prompt in call.prompts],
        **({} if images is None else {"image_data": images.images}),
        "sampling_params": [
            {
                "temperature": call.temperature,
                "max_new_tokens": call.max_new_tokens,
                # Never ignore_eos: SGLang then ignores these as well.
                "stop_token_ids": call.stop_token_ids,
                # Heeded by a server that runs with --enable-deterministic-inference.
                "sampling_seed": seed,
            }
            for seed in call.seeds
        ],
        "return_logprob": True,
        **({} if adapter is None else {"lora_path": [adapter] * len(call.prompts)}),
    }
