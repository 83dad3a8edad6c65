"""What CUDA has and a new device lacks: autocast by torch's own lists, and attention that keeps no scores.

For a rehearsal of a CPU attention is the CPU's kernel, whose results lie otherwise in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unirl.train.backend.block_attention import is_flash
from unirl.types.device_kinds import CPU
from unirl.types.devices import PRETEND

aten = torch.ops.aten
_libraries: list[torch.library.Library] = []
"""Registrations last as long as these."""
_weights: dict[int, tuple[Tensor, Tensor]] = {}
"""Float32 weights that autocast cast, until the outermost autocast ends."""
_AUTOCAST: Any = torch._C._parse_dispatch_key("AutocastPrivateUse1")  # Any: torch's stub leaves this key out
_EXCLUDED = torch._C.DispatchKeySet(_AUTOCAST)
_standing: list[str] = []
"""The devices that the pretend one stands for, the last one now; of all threads, since autograd's compute too."""


@contextmanager
def kernels_of(device: str) -> Generator[None]:
    """Within it the pretend device has the attention of this kind of device."""
    _standing.append(device)
    try:
        yield
    finally:
        _standing.pop()


def register_kernels() -> None:
    """Autocast and attention of the pretend device."""
    through = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    through.fallback(torch.library.fallthrough_kernel)
    casts = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name, to in (("AT_FORALL_LOWER_PRECISION_FP", None), ("AT_FORALL_FP32", torch.float32)):
        for operator, overload in _listed(name).items():
            casts.impl(operator, _casting(overload, to))
    for operator, overload in _listed("AT_FORALL_FP32_SET_OPT_DTYPE").items():
        casts.impl(operator, _in_float32(overload))
    fused = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    fused.impl("scaled_dot_product_attention", attention)
    _libraries.extend((through, casts, fused))
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        _weights.clear()
        clear()

    setattr(torch, "clear_autocast_cache", clear_all)  # noqa: B010 - ty takes an assignment for another function


def _listed(name: str) -> dict[str, Callable[..., Any]]:
    """Operators of a list of autocast, each once, as the header that torch ships has it. Any: an operator's values."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text(encoding="utf-8")
    body = header.split(f"#define {name}(_)", 1)[1].split("#define", 1)[0]
    found: dict[str, Callable[..., Any]] = {}
    for operator, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body):
        packet = getattr(aten, operator, None)
        chosen = "default" if overload in ("", "deprecated") else overload
        if packet is not None and chosen in packet.overloads():
            found[operator if chosen == "default" else f"{operator}.{chosen}"] = getattr(packet, chosen)
    return found


def _casting(overload: Callable[..., Any], to: torch.dtype | None) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:  # Any: as above
        dtype = to if to is not None else torch.get_autocast_dtype(PRETEND)
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return overload(
                *(_cast(value, dtype) for value in args), **{key: _cast(value, dtype) for key, value in kwargs.items()}
            )

    return run


def _in_float32(overload: Callable[..., Any]) -> Callable[..., Any]:
    def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:  # Any: as above
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            if kwargs.get("dtype") is None and first.dtype in (torch.bfloat16, torch.float16):
                kwargs["dtype"] = torch.float32
            return overload(first, *args, **kwargs)

    return run


def _cast(value: Any, dtype: torch.dtype) -> Any:  # Any: as above
    if isinstance(value, list | tuple):
        return type(value)(_cast(each, dtype) for each in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if value.dtype in (dtype, torch.float64) or value.device.type == "cpu":
        return value
    is_weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32
    if not (is_weight and torch.is_autocast_cache_enabled() and dtype != torch.float32):
        return value.to(dtype)
    hit = _weights.get(id(value))
    if hit is None or hit[0] is not value:
        hit = _weights[id(value)] = (value, value.to(dtype))
    return hit[1]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """About CUDA's choice: flash attention in half precision without a mask, else the memory-efficient kernel, and the
    plain form for what neither takes. query: [..., H, n, D]."""
    if _standing[-1:] == [CPU]:
        return _attention_of_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa and attn_mask is not None and key.shape[-3] != query.shape[-3]:
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    width = query.shape[-1]
    if query.ndim != 4:
        plain = aten._scaled_dot_product_attention_math
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if is_flash(query, attn_mask):
        room = -width % 8
        if room:
            query, key, value = (F.pad(part, (0, room)) for part in (query, key, value))
        flash = aten._scaled_dot_product_flash_attention
        out = flash(query, key, value, dropout_p, is_causal, False, scale=scale or width**-0.5)[0]
        return out[..., :width] if room else out
    bias = _bias(query, attn_mask)
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    keeps = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)[0]


def _attention_of_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The CPU's choice: its fused kernel, which takes masks, fewer heads of keys, and values as wide as queries."""
    if query.ndim == 3:
        batched = (part.unsqueeze(0) for part in (query, key, value))
        return _attention_of_cpu(*batched, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa).squeeze(0)
    if query.ndim != 4 or value.shape[-1] != query.shape[-1] or dropout:
        plain = aten._scaled_dot_product_attention_math
        return plain(query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    fused = aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout, is_causal, attn_mask=_bias(query, mask), scale=scale)[0]


def _bias(query: Tensor, mask: Tensor | None) -> Tensor | None:
    """A mask as what is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
