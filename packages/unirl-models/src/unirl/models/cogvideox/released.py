"""Sizes of the released checkpoints of CogVideoX."""

from unirl.models.released import Released

RELEASED = {
    "zai-org/CogVideoX-2b": Released(
        trained=1.69,
        text=4.76,
        vae=0.216,
        width=1920,
        blocks=30,
        pixels_per_token=16,
        frame_factor=4,
        text_tokens=226,
        text_width=4096,
        decode_kb=92.0,
    ),
}
