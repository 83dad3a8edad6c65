"""Sizes of the released checkpoints of HunyuanImage3."""

from unirl.models.released import Released

RELEASED = {
    # All experts; per token eight compute, plus the shared one. Decoding is counted alike, on our own VAE.
    "tencent/HunyuanImage-3.0-Instruct": Released(
        trained=81.0,
        text=0.0,
        vae=1.26,
        width=4096,
        blocks=32,
        pixels_per_token=16,
        text_tokens=512,
        text_width=1,
        decode_kb=10.2,
        decode_gradient_kb=75.3,
        kept_per_token=41,
        held_per_token=38,
        beside=0.77,
    ),
}
