"""The floating-point types that options may name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unirl.types.errors import ConfigError

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the names of `unirl.types.sampling.PRECISIONS`, which needs no torch."""


def dtype_named(name: str, where: str) -> torch.dtype:
    """The dtype called "fp32", "bf16" or "fp16". Raises ConfigError naming the option `where` for any other name."""
    if name not in DTYPES:
        raise ConfigError(f"{where} = {name!r} must be one of {', '.join(DTYPES)}")
    return DTYPES[name]
