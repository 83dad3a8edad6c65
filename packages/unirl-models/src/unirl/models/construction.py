"""Models built from their configuration, with no weights read: for rehearsals, and to be filled later."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unirl.models.extras import from_extra

with from_extra("diffusers"):
    import transformers
    from diffusers.models.modeling_utils import ModelMixin


def from_configuration(model_class: Any, folder: Path, dtype: torch.dtype, device: str | torch.device) -> Any:
    """A model in evaluation mode on `device`, of the configuration in `folder`, in the dtypes that `from_pretrained`
    with `dtype` would give its weights; values are those of its constructor.

    model_class: of diffusers, of transformers, or an auto class of transformers (Any: they share no base class).
    """
    if issubclass(model_class, ModelMixin):
        model: Any = _diffusers_model(model_class, folder, dtype, device)
    else:
        model = _transformers_model(model_class, folder, dtype, device)
    return model.eval()


def _diffusers_model(model_class: Any, folder: Path, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    config = model_class.load_config(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class.from_config(config)
    finally:
        torch.set_default_dtype(before)
    _cast_saved(model, dtype, in_float32=model_class._keep_in_fp32_modules or ())
    return model


def _transformers_model(model_class: Any, folder: Path, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    is_auto = not issubclass(model_class, nn.Module)
    with torch.device(device):
        if is_auto:
            model = model_class.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=dtype)
        else:
            model = model_class._from_config(model_class.config_class.from_pretrained(folder), dtype=dtype)
    strictly = model._keep_in_fp32_modules_strict or ()
    _cast_saved(
        model,
        dtype,
        in_float32=(*(model._keep_in_fp32_modules or ()), *strictly) if dtype == torch.float16 else strictly,
    )
    return model


def _cast_saved(model: nn.Module, dtype: torch.dtype, *, in_float32: Collection[str]) -> None:
    """Give parameters and saved buffers the dtype that loading does, whatever a constructor chose. in_float32: parts
    of names that keep float32."""
    for path, module in model.named_modules():
        unsaved = module._non_persistent_buffers_set
        for place in (module._parameters, module._buffers):
            for name, value in place.items():
                if value is None or not value.is_floating_point() or name in unsaved:
                    continue
                keeps = any(part in in_float32 for part in (*path.split("."), name))
                wanted = torch.float32 if keeps else dtype
                if value.dtype != wanted:
                    cast = value.detach().to(wanted)
                    place[name] = nn.Parameter(cast, value.requires_grad) if place is module._parameters else cast
