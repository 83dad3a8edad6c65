"""Random pipelines of two layers that engines run natively, from the table of families where it fits."""

import importlib
import json
from pathlib import Path
from typing import Any

import diffusers
import torch

# Any, below: classes of diffusers.
_z_image: Any = importlib.import_module("packages.unirl-models.tests.families.z_image")
_flux: Any = importlib.import_module("packages.unirl-models.tests.families.flux")
_qwen_image: Any = importlib.import_module("packages.unirl-models.tests.families.qwen_image")
_hunyuan_video15: Any = importlib.import_module("packages.unirl-models.tests.families.hunyuan_video15")
_kit: Any = importlib.import_module("packages.unirl-models.tests.families.kit")


def _latents_of_a_factor_of_8() -> Any:
    """The factor and channels that SGLang takes Z-Image's latents to have."""
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _z_image_pipeline() -> Any:
    pipeline = _z_image.tiny(6.0)()
    pipeline.register_modules(
        vae=_latents_of_a_factor_of_8(),
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=16,
            dim=64,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=64,
            axes_dims=[16, 8, 8],
            axes_lens=[256, 32, 32],
        ),
    )
    return pipeline


def save_z_image(folder: Path) -> Path:
    """SGLang calls two of the sizes otherwise than diffusers, and takes the released ones where its own names lack."""
    _saved(_z_image_pipeline, folder)
    path = folder / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_layers": config["n_layers"], "num_attention_heads": config["n_heads"]}))
    return folder


def save_qwen_image(folder: Path) -> Path:
    """As in the table of families."""
    return _saved(_qwen_image.tiny, folder)


def save_flux(folder: Path) -> Path:
    """As in the table of families, with guidance as an input."""
    return _saved(_flux.dev, folder)


def save_hunyuan_video15(folder: Path) -> Path:
    """As in the table of families."""
    return _saved(_hunyuan_video15.tiny, folder)


def _saved(make: Any, folder: Path) -> Path:
    pipeline = _kit.seeded(make)()
    with torch.no_grad():
        for name, parameter in pipeline.transformer.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                parameter.mul_(2.0)  # or a random model hardly looks at its text
    pipeline.save_pretrained(folder)
    return folder
