"""What a diffusers pipeline needs of the size of its images and videos. See `unirl.types.recipe`."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.types.recipe import Messages, Part, Run


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


def frames_divide(own: Part, run: Run) -> Messages:
    """Frames are the family's factor times k, plus 1; a family of images makes one."""
    factor, value = own.ability("frame_divisor"), run.sampling.node.get("num_frames", 1)
    if not isinstance(value, int):
        return
    if not factor and value != 1:
        yield f"sampling.num_frames = {value} means nothing to a model of images. Set sampling.num_frames: 1."
    elif factor and (value < 1 or (value - 1) % factor):
        below = max(value - 1, 0) // factor * factor + 1
        yield (
            f"sampling.num_frames = {value} is not {factor} k + 1. Set sampling.num_frames: {below} or "
            f"{below + factor}."
        )


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
    factor = config.get("spatial_compression_ratio")
    levels = config.get("block_out_channels") or config.get("encoder_block_out_channels")
    temporal, scale = config.get("temperal_downsample"), config.get("scale_factor_spatial")
    if isinstance(scale, int):
        return scale
    if isinstance(factor, int):
        return factor
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


RULES = (image_divides, frames_divide)
