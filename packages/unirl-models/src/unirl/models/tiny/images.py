"""Random autoencoders and schedulers of image models. Any: classes of diffusers, as in `unirl.models.tiny.text`."""

from __future__ import annotations

from typing import Any

from unirl.models.extras import from_extra

with from_extra("diffusers"):
    import diffusers


def autoencoder_kl() -> Any:
    """A factor of 2, four channels."""
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5305,
    )


def dynamic_scheduler(**changes: Any) -> Any:
    """Flow matching whose shift follows the resolution."""
    fields: dict[str, Any] = {
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "shift": 1.0,
        "use_dynamic_shifting": True,
        "time_shift_type": "exponential",
    }
    return diffusers.FlowMatchEulerDiscreteScheduler(**fields | changes)
