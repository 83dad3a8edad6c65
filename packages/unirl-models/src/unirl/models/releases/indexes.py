"""Indexes of the released checkpoints, as their folders have them: what a bundle must accept.

Classes are written `library.Class`, the library as the index has it; None for a component that the release leaves out.
Versions and what the pipelines need besides components are left out, but for settings that a bundle reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.models.installed import MODULAR_INDEX

Index = Mapping[str, Any]  # Any: a class, None, or a setting

_CLIP = "transformers.CLIPTextModel"
_CLIP_PROJECTED = "transformers.CLIPTextModelWithProjection"
_CLIP_TOKENIZER = "transformers.CLIPTokenizer"
_T5 = "transformers.T5EncoderModel"
_T5_TOKENIZER = "transformers.T5TokenizerFast"
_EULER = "diffusers.FlowMatchEulerDiscreteScheduler"
_UNIPC = "diffusers.UniPCMultistepScheduler"
_KL = "diffusers.AutoencoderKL"
_H3_EULER = "diffusers.MiniMaxH3Scheduler"
_QWEN_VL = "transformers.Qwen2_5_VLForConditionalGeneration"

_SD3: Index = {
    "_class_name": "StableDiffusion3Pipeline",
    "scheduler": _EULER,
    "text_encoder": _CLIP_PROJECTED,
    "text_encoder_2": _CLIP_PROJECTED,
    "text_encoder_3": _T5,
    "tokenizer": _CLIP_TOKENIZER,
    "tokenizer_2": _CLIP_TOKENIZER,
    "tokenizer_3": _T5_TOKENIZER,
    "transformer": "diffusers.SD3Transformer2DModel",
    "vae": _KL,
}
_FLUX1: Index = {
    "_class_name": "FluxPipeline",
    "scheduler": _EULER,
    "text_encoder": _CLIP,
    "text_encoder_2": _T5,
    "tokenizer": _CLIP_TOKENIZER,
    "tokenizer_2": _T5_TOKENIZER,
    "transformer": "diffusers.FluxTransformer2DModel",
    "vae": _KL,
}
_FLUX2: Index = {
    "scheduler": _EULER,
    "transformer": "diffusers.Flux2Transformer2DModel",
    "vae": "diffusers.AutoencoderKLFlux2",
}
_KLEIN: Index = {
    **_FLUX2,
    "_class_name": "Flux2KleinPipeline",
    "is_distilled": False,
    "text_encoder": "transformers.Qwen3ForCausalLM",
    "tokenizer": "transformers.Qwen2TokenizerFast",
}
_QWEN_IMAGE: Index = {
    "_class_name": "QwenImagePipeline",
    "scheduler": _EULER,
    "text_encoder": _QWEN_VL,
    "tokenizer": "transformers.Qwen2Tokenizer",
    "transformer": "diffusers.QwenImageTransformer2DModel",
    "vae": "diffusers.AutoencoderKLQwenImage",
}
_QWEN_IMAGE_EDIT: Index = {**_QWEN_IMAGE, "processor": "transformers.Qwen2VLProcessor"}
_Z_IMAGE: Index = {
    "_class_name": "ZImagePipeline",
    "scheduler": _EULER,
    "text_encoder": "transformers.Qwen3Model",
    "tokenizer": "transformers.Qwen2Tokenizer",
    "transformer": "diffusers.ZImageTransformer2DModel",
    "vae": _KL,
}
_SANA: Index = {
    "_class_name": "SanaPipeline",
    "scheduler": "diffusers.DPMSolverMultistepScheduler",
    "text_encoder": "transformers.Gemma2Model",
    "tokenizer": "transformers.GemmaTokenizerFast",
    "transformer": "diffusers.SanaTransformer2DModel",
    "vae": "diffusers.AutoencoderDC",
}
_COGVIDEOX: Index = {
    "_class_name": "CogVideoXPipeline",
    "scheduler": "diffusers.CogVideoXDPMScheduler",
    "text_encoder": _T5,
    "tokenizer": "transformers.T5Tokenizer",
    "transformer": "diffusers.CogVideoXTransformer3DModel",
    "vae": "diffusers.AutoencoderKLCogVideoX",
}
_WAN: Index = {
    "_class_name": "WanPipeline",
    "scheduler": _UNIPC,
    "text_encoder": "transformers.UMT5EncoderModel",
    "tokenizer": _T5_TOKENIZER,
    "transformer": "diffusers.WanTransformer3DModel",
    "vae": "diffusers.AutoencoderKLWan",
}
_WAN_21_I2V: Index = {
    **_WAN,
    "_class_name": "WanImageToVideoPipeline",
    "image_encoder": "transformers.CLIPVisionModelWithProjection",
    "image_processor": "transformers.CLIPImageProcessor",
}
_WAN_VACE: Index = {
    **_WAN,
    "_class_name": "WanVACEPipeline",
    "transformer": "diffusers.WanVACETransformer3DModel",
}
_ANYFLOW_FAR: Index = {
    **_WAN,
    "_class_name": "AnyFlowFARPipeline",
    "scheduler": "diffusers.FlowMapEulerDiscreteScheduler",
    "transformer": "diffusers.AnyFlowFARTransformer3DModel",
}
_HUNYUAN_VIDEO: Index = {
    "_class_name": "HunyuanVideoPipeline",
    "scheduler": _EULER,
    "text_encoder": "transformers.LlamaModel",
    "text_encoder_2": _CLIP,
    "tokenizer": "transformers.LlamaTokenizerFast",
    "tokenizer_2": _CLIP_TOKENIZER,
    "transformer": "diffusers.HunyuanVideoTransformer3DModel",
    "vae": "diffusers.AutoencoderKLHunyuanVideo",
}
_HUNYUAN_VIDEO_I2V: Index = {
    **_HUNYUAN_VIDEO,
    "_class_name": "HunyuanVideoImageToVideoPipeline",
    "text_encoder": "transformers.LlavaForConditionalGeneration",
    "image_processor": "transformers.CLIPImageProcessor",
}
_HUNYUAN_VIDEO15: Index = {
    "_class_name": "HunyuanVideo15Pipeline",
    "guider": "diffusers.ClassifierFreeGuidance",
    "scheduler": _EULER,
    "text_encoder": "transformers.Qwen2_5_VLTextModel",
    "text_encoder_2": _T5,
    "tokenizer": "transformers.Qwen2TokenizerFast",
    "tokenizer_2": "transformers.ByT5Tokenizer",
    "transformer": "diffusers.HunyuanVideo15Transformer3DModel",
    "vae": "diffusers.AutoencoderKLHunyuanVideo15",
}
_LTX2: Index = {
    "_class_name": "LTX2Pipeline",
    "audio_vae": "diffusers.AutoencoderKLLTX2Audio",
    "connectors": "ltx2.LTX2TextConnectors",
    "scheduler": _EULER,
    "text_encoder": "transformers.Gemma3ForConditionalGeneration",
    "tokenizer": "transformers.GemmaTokenizerFast",
    "transformer": "diffusers.LTX2VideoTransformer3DModel",
    "vae": "diffusers.AutoencoderKLLTX2Video",
    "vocoder": "ltx2.LTX2Vocoder",
}

INDEXES: Mapping[str, Index] = {
    "stabilityai/stable-diffusion-3.5-medium": _SD3,
    "stabilityai/stable-diffusion-3.5-large": _SD3,
    # The released repository holds the ControlNet alone; this is the folder that its stock pipeline saves.
    "InstantX/SD3-Controlnet-Canny": {
        **_SD3,
        "_class_name": "StableDiffusion3ControlNetPipeline",
        "controlnet": "diffusers.SD3ControlNetModel",
    },
    "stabilityai/stable-diffusion-xl-base-1.0": {
        "_class_name": "StableDiffusionXLPipeline",
        "force_zeros_for_empty_prompt": True,
        "scheduler": "diffusers.EulerDiscreteScheduler",
        "text_encoder": _CLIP,
        "text_encoder_2": _CLIP_PROJECTED,
        "tokenizer": _CLIP_TOKENIZER,
        "tokenizer_2": _CLIP_TOKENIZER,
        "unet": "diffusers.UNet2DConditionModel",
        "vae": _KL,
    },
    "black-forest-labs/FLUX.1-dev": _FLUX1,
    "black-forest-labs/FLUX.1-schnell": _FLUX1,
    "black-forest-labs/FLUX.1-Kontext-dev": {
        **_FLUX1,
        "_class_name": "FluxKontextPipeline",
        "feature_extractor": None,
        "image_encoder": None,
    },
    "black-forest-labs/FLUX.1-Fill-dev": {**_FLUX1, "_class_name": "FluxFillPipeline"},
    # Classes of the docstring of the stock pipeline.
    "black-forest-labs/FLUX.2-dev": {
        **_FLUX2,
        "_class_name": "Flux2Pipeline",
        "text_encoder": "transformers.Mistral3ForConditionalGeneration",
        "tokenizer": "transformers.PixtralProcessor",
    },
    "black-forest-labs/FLUX.2-klein-base-4B": _KLEIN,
    "black-forest-labs/FLUX.2-klein-base-9B": _KLEIN,
    "Qwen/Qwen-Image": _QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit": {**_QWEN_IMAGE_EDIT, "_class_name": "QwenImageEditPipeline"},
    "Qwen/Qwen-Image-Edit-2509": {**_QWEN_IMAGE_EDIT, "_class_name": "QwenImageEditPlusPipeline"},
    "Qwen/Qwen-Image-Edit-2511": {**_QWEN_IMAGE_EDIT, "_class_name": "QwenImageEditPlusPipeline"},
    "Tongyi-MAI/Z-Image": _Z_IMAGE,
    "Tongyi-MAI/Z-Image-Turbo": _Z_IMAGE,
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": _SANA,
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": _SANA,
    "zai-org/CogVideoX-2b": {**_COGVIDEOX, "scheduler": "diffusers.CogVideoXDDIMScheduler"},
    "zai-org/CogVideoX-5b": _COGVIDEOX,
    "zai-org/CogVideoX1.5-5B": _COGVIDEOX,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _WAN,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _WAN,
    "nvidia/AnyFlow-FAR-Wan2.1-1.3B-Diffusers": _ANYFLOW_FAR,
    "nvidia/AnyFlow-FAR-Wan2.1-14B-Diffusers": _ANYFLOW_FAR,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": {
        **_WAN,
        "boundary_ratio": 0.875,
        "transformer_2": "diffusers.WanTransformer3DModel",
    },
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {
        **_WAN,
        "boundary_ratio": None,
        "expand_timesteps": True,
        "transformer_2": None,
    },
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": _WAN_21_I2V,
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": _WAN_21_I2V,
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": {
        **_WAN,
        "_class_name": "WanImageToVideoPipeline",
        "boundary_ratio": 0.9,
        "expand_timesteps": False,
        "image_encoder": None,
        "image_processor": None,
        "transformer_2": "diffusers.WanTransformer3DModel",
    },
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": _WAN_VACE,
    "Wan-AI/Wan2.1-VACE-14B-diffusers": _WAN_VACE,
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": {
        **_WAN,
        "_class_name": "WanAnimatePipeline",
        "image_encoder": "transformers.CLIPVisionModel",
        "image_processor": "transformers.CLIPImageProcessor",
        "transformer": "diffusers.WanAnimateTransformer3DModel",
    },
    "hunyuanvideo-community/HunyuanVideo": _HUNYUAN_VIDEO,
    "hunyuanvideo-community/HunyuanVideo-I2V": _HUNYUAN_VIDEO_I2V,
    "hunyuanvideo-community/HunyuanVideo-I2V-33ch": _HUNYUAN_VIDEO_I2V,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": _HUNYUAN_VIDEO15,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": {
        **_HUNYUAN_VIDEO15,
        "_class_name": "HunyuanVideo15ImageToVideoPipeline",
        "image_encoder": "transformers.SiglipVisionModel",
        "feature_extractor": "transformers.SiglipImageProcessor",
    },
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": {
        "_class_name": "HunyuanImagePipeline",
        "guider": "diffusers.AdaptiveProjectedMixGuidance",
        "ocr_guider": "diffusers.AdaptiveProjectedMixGuidance",
        "scheduler": _EULER,
        "text_encoder": _QWEN_VL,
        "text_encoder_2": _T5,
        "tokenizer": "transformers.Qwen2Tokenizer",
        "tokenizer_2": "transformers.ByT5Tokenizer",
        "transformer": "diffusers.HunyuanImageTransformer2DModel",
        "vae": "diffusers.AutoencoderKLHunyuanImage",
    },
    "Lightricks/LTX-2": _LTX2,
    # Its processor, which only enhances prompts, is left out. "Lightricks/LTX-2.3" has files of another layout.
    "diffusers/LTX-2.3-Diffusers": {**_LTX2, "vocoder": "ltx2.LTX2VocoderWithBWE"},
    # Classes of the blocks of diffusers. Left out is what only references pass: a second transformer and a processor.
    "MiniMaxAI/MiniMax-H3": {
        "_class_name": "MiniMaxH3ModularPipeline",
        "audio_scheduler": _H3_EULER,
        "audio_vae": "diffusers.AutoencoderKLMiniMaxH3Audio",
        "scheduler": _H3_EULER,
        "text_encoder": "transformers.Qwen3VLForConditionalGeneration",
        "tokenizer": "transformers.Qwen2Tokenizer",
        "transformer": "diffusers.MiniMaxH3Transformer3DModel",
        "vae": "diffusers.AutoencoderKLMiniMaxH3",
    },
}
"""Hub id -> index."""


def index_of(hub_id: str) -> dict[str, Any]:  # Any: JSON values
    """Index of a release: library and class of each component, and settings."""
    found: dict[str, Any] = {}  # Any: as above
    for name, value in INDEXES[hub_id].items():
        if isinstance(value, str) and not name.startswith("_"):
            found[name] = value.split(".")
        else:
            is_component = value is None and name != "boundary_ratio"
            found[name] = [None, None] if is_component else value
    return found


def write_index(index: Mapping[str, Any], folder: Path) -> None:  # Any: as above
    """Write an index as its pipeline does: one of blocks says of each component where it lies."""
    file = "model_index.json"
    if "Modular" in index["_class_name"]:
        file = MODULAR_INDEX
        index = {
            name: [*entry, {"pretrained_model_name_or_path": str(folder), "subfolder": name, "type_hint": entry}]
            if isinstance(entry, list)
            else entry
            for name, entry in index.items()
        }
    (folder / file).write_text(json.dumps(index, indent=2), encoding="utf-8")
