"""Names of floating-point types, and the rule which parameter is kept in which."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from unirl.types.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_named(name: str, where: str) -> torch.dtype:
    """The dtype called "fp32", "bf16" or "fp16". Raises ConfigError naming `where` for any other name."""
    if name not in DTYPES:
        raise ConfigError(f"{where} = {name!r} is no dtype. Choose one of: {', '.join(DTYPES)}.")
    return DTYPES[name]


def keep_in(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Convert parameters in place; the Parameter objects stay the same."""
    for parameter in parameters:
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def check_frozen_dtype(modules: Iterable[tuple[str, nn.Module]], param_dtype: str) -> None:
    """Raise ConfigError where frozen weights were loaded in half precision and `param_dtype` asks for float32.

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
