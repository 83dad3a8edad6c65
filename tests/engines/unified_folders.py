"""Random BAGEL and HunyuanImage3 checkpoints with all that vLLM-Omni reads next to what we read."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

from unirl.models.bagel.configuration import VAEConfig

tiny_bagel: Any = importlib.import_module("packages.unirl-models.tests.tiny_bagel")
tiny_hunyuan_image3: Any = importlib.import_module("packages.unirl-models.tests.tiny_hunyuan_image3")

HUNYUAN_STAGES = """pipeline: hunyuan_image3_dit
async_chunk: false
stages:
  - stage_id: 0
    max_num_seqs: 1
    enforce_eager: true
    devices: "0"
    default_sampling_params:
      seed: 42
"""
"""One stage on one device; the deployment file that vLLM-Omni ships has four."""

HUNYUAN_CONFIG = '''"""The names of config.json that its own constructor would fold into others, or drop."""

from transformers import PretrainedConfig


class HunyuanImage3Config(PretrainedConfig):
    model_type = "hunyuan_image_3_moe"

    def __init__(self, rope_theta=10000.0, **rest):
        super().__init__(**rest)
        self.use_cache = False
        self.rope_theta = rope_theta
'''


def save_bagel(folder: Path) -> Path:
    """Its autoencoder has the published size: vLLM-Omni takes that for granted, and 32 x 32 latent positions."""
    config = dataclasses.replace(tiny_bagel.TINY, vae=VAEConfig(), max_latent_size=32)
    made: Path = tiny_bagel.save_bagel(folder, config=config)
    said = {
        file: json.loads((made / file).read_text()) for file in ("config.json", "llm_config.json", "vit_config.json")
    }
    said["llm_config.json"] |= {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "qk_norm": True,
    }
    # It keeps every layer that the configuration counts.
    said["vit_config.json"] |= {
        "hidden_act": "gelu_pytorch_tanh",
        "num_hidden_layers": config.vision.num_hidden_layers,
    }
    said["config.json"] |= {
        "architectures": ["BagelForConditionalGeneration"],
        "visual_gen": True,
        "visual_und": True,
        "llm_config": said["llm_config.json"],
        "vit_config": said["vit_config.json"],
        "vae_config": {"z_channels": 16, "downsample": 8},
        "max_latent_size": 32,
        "vit_max_num_patch_per_side": config.vision.patches_per_side,
        "connector_act": "gelu_pytorch_tanh",
        "interpolate_pos": False,
        "timestep_shift": 1.0,
    }
    said["preprocessor_config.json"] = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 56, "width": 56},
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 3,
    }
    for file, values in said.items():
        (made / file).write_text(json.dumps(values))
    return made


def save_hunyuan_image3(folder: Path, *, seed: int = 0) -> Path:
    """With the configuration class of its own code, and `stages.yaml`, a deployment on one device."""
    made: Path = tiny_hunyuan_image3.save_hunyuan_image3(folder, seed=seed)
    said = json.loads((made / "config.json").read_text())
    tokenizer = tiny_hunyuan_image3.tokenizer()
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    said |= ends | {
        "architectures": ["HunyuanImage3ForCausalMM"],
        "auto_map": {"AutoConfig": "configuration_hunyuan_image_3.HunyuanImage3Config"},
        "head_dim": said["attention_head_dim"],
        "hidden_act": "silu",
        "rope_scaling": {"type": "custom", "alpha": 1000.0, "factor": 1.0},
        "attention_bias": False,
        "mlp_bias": False,
        "use_rotary_pos_emb": True,
        "norm_type": "rms",
        "moe_layer_num_skipped": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cla": False,
        "cla_share_factor": 1,
        "capacity_factor": 1.0,
        "moe_drop_tokens": False,
        "norm_topk_prob": True,
        "pad_id": tokenizer.pad_token_id,
        "attention_dropout": 0.0,
        "img_proj_type": "unet",
        "vae_downsample_factor": [16, 16],
        "vit_aligner": {
            "projector_type": "mlp_gelu",
            "input_dim": said["vit"]["hidden_size"],
            "n_embed": said["hidden_size"],
            "depth": 2,
        },
    }
    said["vae"] |= {
        "_class_name": "AutoencoderKLConv3D",
        "in_channels": 3,
        "out_channels": 3,
        "sample_size": 384,
        "sample_tsize": 96,
        "downsample_match_channel": True,
        "upsample_match_channel": True,
    }
    said["vit"] |= {"hidden_act": "gelu_pytorch_tanh", "attention_dropout": 0.0}
    said["vit_processor"] |= {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": said["vit"]["patch_size"],
        "resample": 2,
    }
    (made / "config.json").write_text(json.dumps(said))
    generation = json.loads((made / "generation_config.json").read_text())
    generation |= ends | {"flow_shift": 3.0, "diff_infer_steps": 50, "diff_guidance_scale": 5.0, "max_length": 512}
    (made / "generation_config.json").write_text(json.dumps(generation))
    (made / "configuration_hunyuan_image_3.py").write_text(HUNYUAN_CONFIG)
    (made / "stages.yaml").write_text(HUNYUAN_STAGES)
    return made
