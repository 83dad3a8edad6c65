"""Writes a checkpoint of a released size with random weights, so that speed and memory need no download.

    uv run python apps/trainer/bench/random_checkpoint.py sd3.5-medium models/sd35
    uv run trainer bench sd3/nft runtime=local num_devices=1 bundle.pretrained_model=models/sd35 \\
        data.path=models/sd35/prompts.txt eval.prompts=models/sd35/prompts.txt ...

What trains, and the VAE, have the published configurations; text encoders have the published width but next to no
layers, and tokenizers know bytes. The weights are bfloat16, drawn by the modules' own initialisers on `--device`.
docs/results/performance.md has the commands and what they measured.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from unirl.app.environment import device_here
from unirl.models.releases.configurations import settings_of
from unirl.models.tiny.text import byte_tokenizer

PROMPTS = [f"picture number {number}" for number in range(64)]
SPECIAL = ("<pad>", "<end>", "<unk>", "<start>", "<image>", "<video>", "<vision>", "</vision>")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

Make = Callable[[], Any]  # Any: classes of diffusers and transformers, here and below


def tokenizer(max_length: int) -> Any:
    """Special tokens first, then bytes."""
    return byte_tokenizer(
        {token: i for i, token in enumerate(SPECIAL)},
        model_max_length=max_length,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )


def clip(width: int) -> Any:
    """The last layer but one is read, so there are two."""
    config = transformers.CLIPTextConfig(
        vocab_size=300,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        projection_dim=width,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=3,
    )
    return transformers.CLIPTextModelWithProjection(config)


def qwen3(**changes: Any) -> Any:
    """A language model of one narrow layer, where nothing else is said."""
    fields: dict[str, Any] = {
        "vocab_size": 300,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields | changes))


def qwen_vl() -> Any:
    """Text of the width of Qwen2.5-VL 7B."""
    text = {
        "vocab_size": 300,
        "hidden_size": 3584,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1e6, "rope_type": "default"},
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 3584,
    }
    ids: dict[str, Any] = {
        "image_token_id": 4,
        "video_token_id": 5,
        "vision_start_token_id": 6,
        "vision_end_token_id": 7,
    }
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def released(hub_id: str, component: str, model_class: Any) -> Make:
    """A component of the released size."""
    return lambda: model_class.from_config(settings_of(hub_id, component, model_class.__name__))


SD35_MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
KLEIN_4B = "black-forest-labs/FLUX.2-klein-base-4B"
WAN_1_3B = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
PIPELINES: Mapping[str, tuple[Any, dict[str, Make]]] = {
    "sd3.5-medium": (
        diffusers.StableDiffusion3Pipeline,
        {
            "transformer": released(SD35_MEDIUM, "transformer", diffusers.SD3Transformer2DModel),
            "vae": released(SD35_MEDIUM, "vae", diffusers.AutoencoderKL),
            "text_encoder": lambda: clip(768),
            "text_encoder_2": lambda: clip(1280),
            "text_encoder_3": lambda: transformers.T5EncoderModel(
                transformers.T5Config(vocab_size=300, d_model=4096, d_ff=64, num_layers=1, num_heads=1)
            ),
            "tokenizer": lambda: tokenizer(77),
            "tokenizer_2": lambda: tokenizer(77),
            "tokenizer_3": lambda: tokenizer(512),
        },
    ),
    "qwen-image": (
        diffusers.QwenImagePipeline,
        {
            "transformer": diffusers.QwenImageTransformer2DModel,  # the class's defaults are the released sizes
            "vae": diffusers.AutoencoderKLQwenImage,
            "text_encoder": qwen_vl,
            "tokenizer": lambda: tokenizer(4096),
        },
    ),
    "flux.2-klein-4b": (
        diffusers.Flux2KleinPipeline,
        {
            "transformer": released(KLEIN_4B, "transformer", diffusers.Flux2Transformer2DModel),
            "vae": diffusers.AutoencoderKLFlux2,
            "text_encoder": lambda: qwen3(hidden_size=2560, num_hidden_layers=28),
            "tokenizer": lambda: tokenizer(4096),
        },
    ),
    "wan2.1-1.3b": (
        diffusers.WanPipeline,
        {
            "transformer": released(WAN_1_3B, "transformer", diffusers.WanTransformer3DModel),
            "vae": diffusers.AutoencoderKLWan,
            "text_encoder": lambda: transformers.UMT5EncoderModel(
                transformers.UMT5Config(vocab_size=300, d_model=4096, d_kv=64, d_ff=64, num_layers=1, num_heads=1)
            ),
            "tokenizer": lambda: tokenizer(4096),
        },
    ),
}
"""Name -> pipeline class, and how each of its components is made."""
TEXT_MODELS: Mapping[str, Make] = {
    "qwen3-4b": lambda: qwen3(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
}


def made(make: Make, device: str) -> Any:
    """A component with random weights in bfloat16, or a tokenizer."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return make()
    finally:
        torch.set_default_dtype(torch.float32)


def write_checkpoint(name: str, folder: Path, device: str) -> None:
    """The folder that a download would give, and the prompts (of a text model: questions with answers) next to it."""
    torch.manual_seed(0)
    if name in TEXT_MODELS:
        made(TEXT_MODELS[name], device).save_pretrained(folder)
        tokenizer(40960).save_pretrained(folder)
        rows = "".join(f'{{"prompt": "{prompt}", "answer": "1"}}\n' for prompt in PROMPTS)
        (folder / "prompts.jsonl").write_text(rows)
        return
    pipeline_class, parts = PIPELINES[name]
    components = {component: made(make, device) for component, make in parts.items()}
    pipeline_class(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), **components).save_pretrained(folder)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*PIPELINES, *TEXT_MODELS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default=device_here())
    given = parser.parse_args()
    write_checkpoint(given.name, given.folder, given.device)


if __name__ == "__main__":
    main()
