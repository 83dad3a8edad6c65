"""The rotary embedding that SGLang's text models take from vLLM where there is no GPU."""

import sys
import types

import torch
from torch import Tensor

_MODULE = "vllm._custom_ops"


def register() -> None:
    """Be the module that SGLang imports the kernel from; it needs nothing else of vLLM."""
    module = types.ModuleType(_MODULE)
    module.__dict__["rotary_embedding"] = rotary_embedding
    sys.modules[_MODULE] = module


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotate query and key [T, heads * head_size] in place, by the angles of their positions [T].

    cos_sin_cache [P, R]: cosines, then sines, of R / 2 frequencies; the first R elements of a head are rotated.
    is_neox: whether element i is paired with i + R / 2, else neighbours are paired.
    """
    cos, sin = cos_sin_cache[positions.flatten()].float()[:, None].chunk(2, dim=-1)
    num_rotated = cos_sin_cache.shape[-1]
    for states in (query, key):
        if states is None:
            continue
        rotated = states.view(positions.numel(), -1, head_size)[..., :num_rotated]
        wide = rotated.float()
        first, second = wide.chunk(2, dim=-1) if is_neox else (wide[..., ::2], wide[..., 1::2])
        turned = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.cat(turned, dim=-1) if is_neox else torch.stack(turned, dim=-1).flatten(-2)
        rotated.copy_(joined.to(states.dtype))
