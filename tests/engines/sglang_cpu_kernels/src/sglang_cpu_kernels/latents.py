"""Two kernels that SGLang's Wan and Qwen-Image ask for."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")


def register() -> None:
    """Define both kernels for the CPU."""
    for name, arguments, function in (
        ("fused_norm_scale_shift_cpu", "Tensor x", modulated_norm),
        ("fused_scale_residual_norm_scale_shift_cpu", "Tensor residual, Tensor x, Tensor? gate", residual_norm),
    ):
        returned = "Tensor" if function is modulated_norm else "(Tensor, Tensor)"
        _LIBRARY.define(
            f"{name}({arguments}, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str kind, float eps) "
            f"-> {returned}"
        )
        _LIBRARY.impl(name, function, "CPU")


def modulated_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor, shift: Tensor, kind: str, eps: float
) -> Tensor:
    """norm(x) (1 + scale) + shift, the norm in float32. x [B, L, D]; kind: "layer" or "rms"."""
    width = x.shape[-1:]
    wide = None if weight is None else weight.float()
    if kind == "layer":
        normed = layer_norm(x.float(), width, wide, None if bias is None else bias.float(), eps)
    else:
        normed = rms_norm(x.float(), width, wide, eps)
    return (normed * (1 + _per_token(scale, x)) + _per_token(shift, x)).to(x.dtype)


def residual_norm(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The modulated norm of residual + gate x, and that sum."""
    added = (residual + (x if gate is None else x * _per_token(gate, x))).to(x.dtype)
    return modulated_norm(added, weight, bias, scale, shift, kind, eps), added


def _per_token(parameter: Tensor, x: Tensor) -> Tensor:
    """[B, L or 1, D] of a parameter that may be given per frame, [B, F, 1, D]."""
    if parameter.dim() == 4:
        parameter = parameter.flatten(1, 2).repeat_interleave(x.shape[1] // parameter.shape[1], dim=1)
    return parameter.float()
