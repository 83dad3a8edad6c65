"""SD3 as a family of the table; what only it has is in test_sd3_bundle.py and test_sd3_parity.py."""

from unirl.models.sd3.bundle import SD3Bundle
from unirl.models.sd3.pipeline import SD3Pipeline

from ..tiny import tiny_sd3
from .kit import Family, Published, Request, seeded


def _call(request: Request) -> dict[str, object]:
    params = request.params
    return {
        "prompt": request.texts,
        "negative_prompt": request.negative,
        "guidance_scale": params.guidance_scale,
        "height": params.height,
        "width": params.width,
        "max_sequence_length": params.max_sequence_length,
        "latents": request.noise.clone(),
    }


FAMILIES = [
    Family(
        name="sd3",
        bundle=SD3Bundle,
        pipeline=SD3Pipeline,
        tiny=seeded(tiny_sd3),
        params={"height": 16, "width": 16, "max_sequence_length": 16},
        other_size={"height": 32, "width": 24},
        call=_call,
        schedule="diffusers",
        published=(
            Published(
                "stabilityai/stable-diffusion-3.5-medium",
                2.47,
                {
                    "transformer": {
                        "num_layers": 24,
                        "num_attention_heads": 24,
                        "attention_head_dim": 64,
                        "in_channels": 16,
                        "out_channels": 16,
                        "joint_attention_dim": 4096,
                        "caption_projection_dim": 1536,
                        "pooled_projection_dim": 2048,
                        "pos_embed_max_size": 384,
                        "qk_norm": "rms_norm",
                        "dual_attention_layers": tuple(range(13)),
                    }
                },
            ),
            Published(
                "stabilityai/stable-diffusion-3.5-large",
                8.06,
                {
                    "transformer": {
                        "num_layers": 38,
                        "num_attention_heads": 38,
                        "attention_head_dim": 64,
                        "in_channels": 16,
                        "out_channels": 16,
                        "joint_attention_dim": 4096,
                        "caption_projection_dim": 2432,
                        "pooled_projection_dim": 2048,
                        "pos_embed_max_size": 192,
                        "qk_norm": "rms_norm",
                    }
                },
            ),
        ),
    )
]
