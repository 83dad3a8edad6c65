"""Which parameter is kept in which floating-point type."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from unirl.types.errors import ConfigError


def keep_in(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Convert parameters in place; the Parameter objects stay the same."""
    for parameter in parameters:
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def check_frozen_dtype(modules: Iterable[tuple[str, nn.Module]], param_dtype: str) -> None:
    """Raise ConfigError if frozen weights were loaded in half precision and `param_dtype` asks for float32.

    Trainable parameters are converted; frozen ones are not, so that a base model takes no more memory than loaded.
    """
    if param_dtype != "fp32":
        return
    for component, module in modules:
        for name, parameter in module.named_parameters():
            half = parameter.dtype in (torch.bfloat16, torch.float16)
            if half and not parameter.requires_grad:
                raise ConfigError(
                    f"{component}.{name} is frozen in {parameter.dtype}, but param_dtype = 'fp32' computes in float32. "
                    "Load the model in fp32, or set fsdp.param_dtype: bf16."
                )
