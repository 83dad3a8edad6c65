"""Sizes of the released checkpoints of AnyFlow FAR."""

from dataclasses import replace

from unirl.models.wan.released import RELEASED as OF_WAN

_WAN = OF_WAN["Wan-AI/Wan2.1-T2V-1.3B-Diffusers"]

RELEASED = {
    "nvidia/AnyFlow-FAR-Wan2.1-1.3B-Diffusers": replace(_WAN, reread=3.1),
}
