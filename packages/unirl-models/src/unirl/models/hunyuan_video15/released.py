"""Sizes of the released checkpoints of HunyuanVideo 1.5."""

from unirl.models.released import Released

_HUNYUAN_VIDEO15 = Released(
    trained=8.3,
    text=8.51,
    vae=1.25,
    width=2048,
    blocks=54,
    pixels_per_token=16,
    frame_factor=4,
    text_tokens=1256,
    text_width=3584,
    decode_kb=3.2,
    decodes_at_once=True,
    beside=0.43,
)

RELEASED = {
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": _HUNYUAN_VIDEO15,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": _HUNYUAN_VIDEO15,
}
