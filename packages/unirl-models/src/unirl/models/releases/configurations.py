"""Configurations of the models in released checkpoints, where they differ from the defaults of their classes.

A model is named by the class of its component, and by its repository and component where releases differ. Of the models
that train, tests compare the parameters with what is published; of text encoders and autoencoders, with
`unirl.models.released`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]  # Any: JSON values

CLIP_L: Settings = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "hidden_act": "quick_gelu",
    "vocab_size": 49408,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CLIP_G: Settings = {
    **CLIP_L,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
CLIP_H_VISION: Settings = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 224,
    "projection_dim": 1024,
    "hidden_act": "gelu",
}
_T5_XXL: Settings = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
_BYT5_SMALL: Settings = {
    "vocab_size": 1510,
    "d_model": 1472,
    "d_kv": 64,
    "d_ff": 3584,
    "num_layers": 12,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}
QWEN_25_7B: Settings = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}
_QWEN_VL_IDS: Settings = {
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
}
"""Ids of the stand-in tokenizer."""
QWEN_25_VL_7B: Settings = {
    "text_config": QWEN_25_7B,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
    },
    **_QWEN_VL_IDS,
}
# Qwen3-VL-32B, from memory; diffusers' blocks name its width, and more than 50 layers.
QWEN3_VL_32B: Settings = {
    "text_config": {
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
            "rope_theta": 5e6,
        },
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 5120,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "tie_word_embeddings": False,
    **_QWEN_VL_IDS,
}
QWEN3_4B: Settings = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN3_8B: Settings = {
    **QWEN3_4B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B: Settings = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_8B: Settings = {
    "vocab_size": 128320,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA2_2B: Settings = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_GEMMA3_12B: Settings = {
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
}
_SIGLIP_SO400M: Settings = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 384,
}
_LLAVA_IMAGES: Settings = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
_SD_VAE: Settings = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "sample_size": 1024,
}
_LTX2_VAE: Settings = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
_SD3: Settings = {
    "num_layers": 24,
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
_WAN_1_3B: Settings = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_WAN_21_I2V: Settings = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
_COGVIDEOX_ROTARY: Settings = {"use_rotary_positional_embeddings": True}
_COGVIDEOX_5B: Settings = {"num_attention_heads": 48, "num_layers": 42, **_COGVIDEOX_ROTARY}
_PADDED_TIME: Settings = {"patch_size_t": 2, "patch_bias": False, **_COGVIDEOX_ROTARY}

OF_CLASSES: Mapping[str, Settings] = {
    "CLIPTextModel": CLIP_L,
    "CLIPTextModelWithProjection": CLIP_L,
    "CLIPVisionModel": CLIP_H_VISION,
    "CLIPVisionModelWithProjection": CLIP_H_VISION,
    "T5EncoderModel": _T5_XXL,
    "UMT5EncoderModel": {**_T5_XXL, "vocab_size": 256384},
    "Qwen2_5_VLForConditionalGeneration": QWEN_25_VL_7B,
    "Qwen2_5_VLTextModel": QWEN_25_7B,
    "Qwen3VLForConditionalGeneration": QWEN3_VL_32B,
    "Qwen3Model": QWEN3_4B,
    "Qwen3ForCausalLM": QWEN3_4B,
    "Qwen3MoeForCausalLM": QWEN3_30B_A3B,
    "Gemma2Model": _GEMMA2_2B,
    # The class's defaults are Mistral Small 3.1 but for this, from memory.
    "Mistral3ForConditionalGeneration": {"tie_word_embeddings": False},
    "LlamaModel": _LLAMA3_8B,
    "LlavaForConditionalGeneration": {
        "text_config": {"model_type": "llama", **_LLAMA3_8B},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "projection_dim": 768,
        },
        "image_token_index": 11,
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": _GEMMA3_12B,
        "vision_config": {**_SIGLIP_SO400M, "image_size": 896},
    },
    "SiglipVisionModel": _SIGLIP_SO400M,
    "SiglipImageProcessor": {"size": {"height": 384, "width": 384}},
    "CogVideoXDDIMScheduler": {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "clip_sample": False,
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "snr_shift_scale": 3.0,
        "timestep_spacing": "trailing",
    },
    "AutoencoderKL": _SD_VAE,
    "AutoencoderDC": {
        "latent_channels": 32,
        "encoder_block_types": [*["ResBlock"] * 3, *["EfficientViTBlock"] * 3],
        "decoder_block_types": [*["ResBlock"] * 3, *["EfficientViTBlock"] * 3],
        "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
        "decoder_block_out_channels": [128, 256, 512, 512, 1024, 1024],
        "encoder_layers_per_block": [2, 2, 2, 3, 3, 3],
        "decoder_layers_per_block": [3, 3, 3, 3, 3, 3],
        "encoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
        "decoder_qkv_multiscales": [[], [], [], [5], [5], [5]],
        "downsample_block_type": "conv",
        "upsample_block_type": "interpolate",
        "scaling_factor": 0.41407,
    },
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 64,
        "block_out_channels": [128, 256, 512, 512, 1024, 1024],
        "layers_per_block": 2,
        "spatial_compression_ratio": 32,
        "sample_size": 384,
        "scaling_factor": 0.75289,
    },
}
"""By class, unless `OF_RELEASES` says otherwise."""

OF_RELEASES: Mapping[str, Mapping[str, Settings]] = {
    "stabilityai/stable-diffusion-3.5-medium": {
        "transformer": {
            **_SD3,
            "pos_embed_max_size": 384,
            "qk_norm": "rms_norm",
            "dual_attention_layers": list(range(13)),
        },
        "text_encoder_2": _CLIP_G,
        "vae": {"scaling_factor": 1.5305, "shift_factor": 0.0609},
    },
    "stabilityai/stable-diffusion-3.5-large": {
        "transformer": {
            **_SD3,
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "qk_norm": "rms_norm",
        },
        "text_encoder_2": _CLIP_G,
        "vae": {"scaling_factor": 1.5305, "shift_factor": 0.0609},
    },
    "InstantX/SD3-Controlnet-Canny": {
        "transformer": _SD3,
        "controlnet": {**_SD3, "num_layers": 6, "extra_conditioning_channels": 0},
        "text_encoder_2": _CLIP_G,
        "vae": {"scaling_factor": 1.5305, "shift_factor": 0.0609},
    },
    "stabilityai/stable-diffusion-xl-base-1.0": {
        "unet": {
            "sample_size": 128,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "attention_head_dim": [5, 10, 20],
            "block_out_channels": [320, 640, 1280],
            "cross_attention_dim": 2048,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "projection_class_embeddings_input_dim": 2816,
            "transformer_layers_per_block": [1, 2, 10],
            "use_linear_projection": True,
        },
        "text_encoder_2": _CLIP_G,
        "vae": {
            "latent_channels": 4,
            "scaling_factor": 0.13025,
            "use_quant_conv": True,
            "use_post_quant_conv": True,
        },
    },
    "black-forest-labs/FLUX.1-dev": {
        "transformer": {"guidance_embeds": True},
        "vae": {"scaling_factor": 0.3611, "shift_factor": 0.1159},
    },
    "black-forest-labs/FLUX.1-schnell": {"vae": {"scaling_factor": 0.3611, "shift_factor": 0.1159}},
    "black-forest-labs/FLUX.1-Kontext-dev": {
        "transformer": {"guidance_embeds": True},
        "vae": {"scaling_factor": 0.3611, "shift_factor": 0.1159},
    },
    "black-forest-labs/FLUX.1-Fill-dev": {
        "transformer": {"guidance_embeds": True, "in_channels": 384, "out_channels": 64},
        "vae": {"scaling_factor": 0.3611, "shift_factor": 0.1159},
    },
    "black-forest-labs/FLUX.2-klein-base-4B": {
        "transformer": {
            "guidance_embeds": False,
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
        }
    },
    "black-forest-labs/FLUX.2-klein-base-9B": {
        "transformer": {
            "guidance_embeds": False,
            "num_layers": 8,
            "num_single_layers": 24,
            "num_attention_heads": 32,
            "joint_attention_dim": 12288,
        },
        "text_encoder": _QWEN3_8B,
    },
    "Tongyi-MAI/Z-Image": {"vae": {"scaling_factor": 0.3611, "shift_factor": 0.1159}},
    "Tongyi-MAI/Z-Image-Turbo": {"vae": {"scaling_factor": 0.3611, "shift_factor": 0.1159}},
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": {
        "transformer": {
            "num_layers": 28,
            "num_attention_heads": 36,
            "num_cross_attention_heads": 16,
            "cross_attention_head_dim": 72,
            "cross_attention_dim": 1152,
        }
    },
    "zai-org/CogVideoX-5b": {"transformer": _COGVIDEOX_5B},
    "zai-org/CogVideoX1.5-5B": {
        "transformer": {
            **_COGVIDEOX_5B,
            **_PADDED_TIME,
            "sample_height": 300,
            "sample_width": 300,
            "sample_frames": 81,
        }
    },
    "Lightricks/LTX-2": {"vae": _LTX2_VAE},
    # The classes' defaults are the released sizes, and the shift is of the docstring of the scheduler. The moments of
    # sound stand for those of the release, which the library does not name.
    "MiniMaxAI/MiniMax-H3": {
        "audio_scheduler": {"shift": 3.0},
        "audio_vae": {"latents_mean": [0.0] * 32, "latents_std": [1.0] * 32},
    },
    # Of the conversion script of diffusers.
    "diffusers/LTX-2.3-Diffusers": {
        "transformer": {
            "gated_attn": True,
            "cross_attn_mod": True,
            "audio_gated_attn": True,
            "audio_cross_attn_mod": True,
            "rope_type": "split",
            "use_prompt_embeddings": False,
            "perturbed_attn": True,
        },
        "connectors": {
            "video_connector_num_attention_heads": 32,
            "video_connector_num_layers": 8,
            "video_gated_attn": True,
            "audio_connector_num_attention_heads": 32,
            "audio_connector_attention_head_dim": 64,
            "audio_connector_num_layers": 8,
            "audio_gated_attn": True,
            "rope_type": "split",
            "per_modality_projections": True,
            "proj_bias": True,
        },
        "vae": {
            **_LTX2_VAE,
            "block_out_channels": [256, 512, 1024, 1024],
            "layers_per_block": [4, 6, 4, 2, 2],
            "decoder_block_out_channels": [256, 512, 512, 1024],
            "decoder_layers_per_block": [4, 6, 4, 2, 2],
            "decoder_spatio_temporal_scaling": [True] * 4,
            "decoder_inject_noise": [False] * 5,
            "upsample_type": ["spatiotemporal", "spatiotemporal", "temporal", "spatial"],
            "upsample_residual": [False] * 4,
            "upsample_factor": [2, 2, 1, 2],
            "decoder_spatial_padding_mode": "zeros",
        },
    },
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {"transformer": _WAN_1_3B},
    "nvidia/AnyFlow-FAR-Wan2.1-1.3B-Diffusers": {"transformer": _WAN_1_3B},
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {
        "transformer": {
            "num_attention_heads": 24,
            "ffn_dim": 14336,
            "num_layers": 30,
            "in_channels": 48,
            "out_channels": 48,
        },
        "vae": {
            "base_dim": 160,
            "decoder_base_dim": 256,
            "z_dim": 48,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "is_residual": True,
            "scale_factor_spatial": 16,
            "latents_mean": [0.0] * 48,
            "latents_std": [1.0] * 48,
        },
    },
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": {"transformer": _WAN_21_I2V},
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": {"transformer": {**_WAN_21_I2V, "pos_embed_seq_len": 514}},
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": {"transformer": {"in_channels": 36}, "transformer_2": {"in_channels": 36}},
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": {
        "transformer": {**_WAN_1_3B, "vace_layers": list(range(0, 30, 2))},
    },
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": {"transformer": {"added_kv_proj_dim": 5120}},
    "hunyuanvideo-community/HunyuanVideo-I2V": {
        "transformer": {"image_condition_type": "token_replace"},
        "image_processor": _LLAVA_IMAGES,
    },
    "hunyuanvideo-community/HunyuanVideo-I2V-33ch": {
        "image_processor": _LLAVA_IMAGES,
        "transformer": {"image_condition_type": "latent_concat", "guidance_embeds": False, "in_channels": 33},
    },
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": {"text_encoder_2": _BYT5_SMALL},
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": {"text_encoder_2": _BYT5_SMALL},
    "hunyuanvideo-community/HunyuanImage-2.1-Diffusers": {
        "transformer": {"text_embed_2_dim": 1472},
        "text_encoder_2": _BYT5_SMALL,
    },
}
"""By repository and component."""


def settings_of(release: str, component: str, class_name: str) -> dict[str, Any]:  # Any: JSON values
    """What the configuration of a component says, where it differs from the defaults of its class."""
    return {**OF_CLASSES.get(class_name, {}), **OF_RELEASES.get(release, {}).get(component, {})}
