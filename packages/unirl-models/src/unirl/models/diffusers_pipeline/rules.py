"""What a diffusers pipeline needs of the size of its images and videos. See `unirl.types.recipe`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

from unirl.models.rules import undivided_heads
from unirl.types.recipe import Messages, Part, Run

AttentionBackend = Literal[
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "flash",
    "flex",
    "xformers",
]
"""Kernels of diffusers 0.40 that have a gradient. Those of FlashAttention 3 and SageAttention have none there, so what
they sample could not be trained on with the same log-probs."""
OVERLAP = 4
"""A tile shares one part in so many of its side with each neighbour, where the two are blended."""


def image_divides(own: Part, run: Run) -> Messages:
    """Height and width divide into latent patches."""
    divisor = _latent_divisor(
        own.node.get("pretrained_model"), own.ability("latent_divisor"), own.ability("latent_patch")
    )
    for name in ("height", "width"):
        value = run.sampling.node.get(name)
        if isinstance(value, int) and value % divisor:
            nearest = max(divisor, round(value / divisor) * divisor)
            yield f"sampling.{name} = {value} is not divisible by {divisor}. The nearest that is: {nearest}."


def encoders_have_one_place(own: Part, run: Run) -> Messages:
    """Text encoders rest in host memory, or compute elsewhere, or are dropped before the first rollout."""
    if not own.node.get("rest_text_encoders"):
        return
    if own.node.get("text_encoder_device") is not None:
        yield (
            f"{own.at}.rest_text_encoders encodes on the model's device, {own.at}.text_encoder_device = "
            f"{own.node['text_encoder_device']} on another. Remove one of them."
        )
    if run.engine.get("drop_text_encoders"):
        yield (
            f"{own.at}.rest_text_encoders does nothing with {run.engine.at}.drop_text_encoders, which frees them "
            "before the first rollout. Remove one of them."
        )


def frames_divide(own: Part, run: Run) -> Messages:
    """Frames are the family's factor times k, plus a rest; a family of images makes one."""
    factor, rest = own.ability("frame_divisor"), own.ability("frame_rest")
    value = run.sampling.node.get("num_frames", 1)
    if not isinstance(value, int):
        return
    if not factor and value != 1:
        yield f"sampling.num_frames = {value} means nothing to a model of images. Set sampling.num_frames: 1."
    elif factor and (value < rest or (value - rest) % factor):
        below = max(value - rest, 0) // factor * factor + rest
        yield (
            f"sampling.num_frames = {value} is not {factor} k + {rest}. Set sampling.num_frames: {below} or "
            f"{below + factor}."
        )


def tiles_fit(own: Part, run: Run) -> Messages:
    """Tiles of the VAE are smaller than what is made, and the last of a side is no strip that a decoder cannot pad."""
    tile = own.node.get("vae_tile_pixels")
    sides = [run.sampling.get(name) for name in ("height", "width")]
    if not isinstance(tile, int) or tile < OVERLAP or not all(isinstance(side, int) for side in sides):
        return
    if max(sides) <= tile:
        yield (
            f"{own.at}.vae_tile_pixels = {tile} cuts nothing of {sides[0]} x {sides[1]} pixels. Set it below "
            f"{max(sides)}, or null."
        )
    divisor = own.ability("latent_divisor")
    narrow = [side for side in sides if side > tile and _last_tile(side, tile) <= divisor]
    if narrow:
        step = OVERLAP * divisor
        fitting = [
            size
            for size in range(step, max(sides), step)
            if all(side <= size or _last_tile(side, size) > divisor for side in sides)
        ]
        fix = f"Set it to {min(fitting, key=lambda size: abs(size - tile))}" if fitting else "Set it to null"
        yield (
            f"{own.at}.vae_tile_pixels = {tile} leaves a last tile of {_last_tile(narrow[0], tile)} of {narrow[0]} "
            f"pixels, too narrow for a decoder. {fix}."
        )


def spans_fit(own: Part, run: Run) -> Messages:
    """Spans of frames are those that a decoder can be given, and shorter than the video."""
    span, num_frames = own.node.get("vae_tile_frames"), run.sampling.node.get("num_frames", 1)
    if not isinstance(span, int) or not isinstance(num_frames, int):
        return
    problem = span_problem(span, own.ability("frame_divisor"), decodes_at_once=own.ability("decodes_at_once"))
    if problem is None and span >= num_frames:
        problem = f"cuts nothing of {num_frames} frames. Set it below, or null."
    if problem is not None:
        yield f"{own.at}.vae_tile_frames = {span} {problem}"


def heads_divide(own: Part, run: Run) -> Messages:
    """Ranks that share samples divide the attention heads of a checkpoint on this machine."""
    policy = run.policy_of(own)
    size = policy.ranks_of_heads
    for component in ("transformer", "transformer_2"):
        file = Path(str(own.node.get("pretrained_model"))).expanduser() / component / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            heads = config["num_attention_heads"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the model says so before its first forward
        if isinstance(heads, int) and heads % size:
            at = f"{policy.backend.at}.{policy.heads_option}"
            yield undivided_heads(at, size, heads, str(file), has_ring=policy.has_ring)


def attention_is_dispatched(own: Part, run: Run) -> Messages:
    """Another kernel computes attention where the model of diffusers lets it, and of whole samples."""
    name = own.node.get("attention_backend")
    if name is None:
        return
    at, size = f"{own.at}.attention_backend = {name}", run.policy_of(own).ranks_of_tokens
    if not own.ability("takes_attention_backend"):
        yield f"{at} {not_dispatched(own.name)}"
    elif size > 1:
        yield f"{at} computes attention of whole samples, and topology.sp = {size} spreads their tokens. Remove one."


def not_dispatched(family: str) -> str:
    """Why no other kernel computes the attention of a family."""
    return f"changes nothing: the model of {family} in diffusers calls torch's attention. Remove it."


def span_problem(num_frames: int, factor: int, *, decodes_at_once: bool) -> str | None:
    """Why a VAE cannot decode so many frames at a time; None where it can. factor: frames per latent frame."""
    if not decodes_at_once:
        return "means nothing to a family of images, or of videos whose VAE works a few frames at a time. Remove it."
    if num_frames < 2 * factor + 1 or (num_frames - 1) % factor:
        nearest = max(2, round((num_frames - 1) / factor)) * factor + 1
        return f"is not {factor} k + 1 with k of 2 or more. The nearest that is: {nearest}."
    return None


def _last_tile(side: int, tile: int) -> int:
    """Pixels of the last tile on a side."""
    own = tile - tile // OVERLAP
    return side - (side - 1) // own * own


def _latent_divisor(model: str | None, released: int, patch: int) -> int:
    """Pixels per latent patch, from the checkpoint's own configuration where it lies on this machine and is read so.

    released: what the released checkpoints need. patch: 0 where the transformer's patch_size says it.
    """
    if model is None:
        return released
    folder = Path(model).expanduser()
    try:
        vae = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
        return _vae_factor(vae) * (patch or _patch(folder / "transformer" / "config.json"))
    except (OSError, ValueError, KeyError, TypeError):
        return released  # `unirl.models.rules.model_exists` says what is wrong with the folder


def _vae_factor(config: dict[str, object]) -> int:
    """Pixels per latent element on a side, by the names that the VAEs of diffusers give it."""
    factor, factors = config.get("spatial_compression_ratio"), config.get("spatial_downsample_factors")
    levels = config.get("block_out_channels") or config.get("encoder_block_out_channels")
    temporal, scale = config.get("temperal_downsample"), config.get("scale_factor_spatial")
    if isinstance(scale, int):
        return scale
    if isinstance(factor, int):
        return factor
    if isinstance(factors, list):
        return math.prod(factors)
    if isinstance(temporal, list):
        return 2 ** len(temporal)
    if isinstance(levels, list):
        return 2 ** (len(levels) - 1)
    raise KeyError("no factor")


def _patch(file: Path) -> int:
    """Latent elements per token on a side."""
    patch = json.loads(file.read_text(encoding="utf-8"))["patch_size"]
    if isinstance(patch, list) and isinstance(patch[-1], int):
        return patch[-1]
    if isinstance(patch, int):
        return patch
    raise KeyError("no patch")


RULES = (
    attention_is_dispatched,
    encoders_have_one_place,
    image_divides,
    frames_divide,
    tiles_fit,
    spans_fit,
    heads_divide,
)
