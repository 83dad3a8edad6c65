"""Sizes of the released checkpoints of LTX-2 and LTX-2.3."""

from unirl.models.released import Released

RELEASED = {
    "Lightricks/LTX-2": Released(
        trained=18.9,
        text=13.6,
        vae=1.2,
        width=4096,
        blocks=48,
        pixels_per_token=32,
        frame_factor=8,
        text_tokens=1024,
        text_width=7680,
        decode_kb=0.2,
        decodes_at_once=True,
        kept_per_token=34,
        beside=0.1,
    ),
    "diffusers/LTX-2.3-Diffusers": Released(
        trained=19.0,
        text=15.4,
        vae=0.73,
        width=4096,
        blocks=48,
        pixels_per_token=32,
        frame_factor=8,
        text_tokens=1024,
        text_width=6144,
        decode_kb=0.15,
        decodes_at_once=True,
        kept_per_token=34,
        beside=0.18,
    ),
}
