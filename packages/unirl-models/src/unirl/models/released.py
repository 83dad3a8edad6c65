"""How large the released checkpoints of diffusion models are, to estimate memory before any is fetched. No torch.

A family that has some has a module `released` in its folder, with the table RELEASED by the name that recipes give.
Parameters of what trains are those that the tests of the families count on the meta device; bytes of decoding are those
of `apps/trainer/bench/decode_memory.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Released:
    """Sizes of one checkpoint."""

    trained: float
    """Billions of parameters that can train, of all experts."""
    text: float
    """Billions, of all text encoders and what follows them."""
    vae: float
    """Billions, kept in float32."""
    width: int
    """Width of a token inside the transformer."""
    blocks: int
    """Transformer blocks of one expert."""
    pixels_per_token: int
    """On a side."""
    text_tokens: int
    """Most tokens of a text in a forward."""
    text_width: int
    """Width of an embedded text token, as conditions keep it."""
    decode_kb: float
    """Most kilobytes that decoding one sample holds, per pixel of a frame; of a video whose VAE decodes at once, per
    pixel of every frame."""
    decode_short_kb: float | None = None
    """The same of at most two latent frames, where it is less: the caches of a causal VAE are not full then."""
    decodes_at_once: bool = False
    """True if the VAE holds all frames of a video, or of a span of it, while it decodes."""
    decode_gradient_kb: float | None = None
    """The same with what a gradient to the latents needs; None if it is not known."""
    kept_per_token: int = 22
    """Tensors of a token's width that the backward pass of a block keeps, the mean of its blocks."""
    offloaded_per_token: int | None = None
    """Tensors of a token's width that training holds at once where what blocks keep rests in host memory, as a
    rehearsal counts it; None for three times what one block keeps: two blocks, and the gradients of one."""
    held_per_token: int = 16
    """Tensors of a token's width that a block holds at once without gradient: 11 to 16 in the blocks that were counted,
    more where each token goes to several experts."""
    frame_factor: float = 0
    """Frames per latent frame after the first; 0 of a family of images."""
    beside: float = 0.0
    """Billions of frozen parameters beside (image encoders), in the dtype of what trains."""
    reread: float = 1.0
    """Tokens of all forwards of one prediction, per token of its latents: more than 1 where a chunk of a video reads
    those before it again."""
    experts: int = 1
    """Transformers that rows are routed to."""

    @property
    def most_offloaded(self) -> int:
        """`offloaded_per_token`, or what stands for it."""
        return 3 * self.kept_per_token if self.offloaded_per_token is None else self.offloaded_per_token


IMAGE_VAE: dict[str, Any] = {"vae": 0.084, "decode_kb": 3.1, "decode_gradient_kb": 23.7, "pixels_per_token": 16}
"""Sizes shared by the families with the autoencoder of Stable Diffusion and patches of 2."""


@cache
def all_released() -> Mapping[str, Released]:
    """Sizes by the name that recipes give, of every family."""
    found: dict[str, Released] = {}
    for path in Path(__file__).parent.glob("*/released.py"):
        found |= import_module(f"unirl.models.{path.parent.name}.released").RELEASED
    return found
