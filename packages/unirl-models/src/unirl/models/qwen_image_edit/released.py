"""Sizes of the released checkpoints of Qwen-Image-Edit."""

from unirl.models.qwen_image.released import QWEN_IMAGE

RELEASED = {
    "Qwen/Qwen-Image-Edit": QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit-2509": QWEN_IMAGE,
}
