"""Models of transformers that are built from their configuration, with no weights read."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from unirl.models.construction import UnfilledOnMeta, cast_saved, with_parameters_on_meta
from unirl.models.extras import from_extra
from unirl.types.devices import has_values

with from_extra("transformers"):
    import transformers
    from transformers.initialization import no_init_weights


def from_configuration(model_class: Any, folder: Path, dtype: torch.dtype, device: str | torch.device) -> Any:
    """A model in evaluation mode on `device`, of the configuration in `folder`, in the dtypes that `from_pretrained`
    with `dtype` would give its weights; values are those of its constructor.

    model_class: of transformers, or an auto class (Any: they share no base class).
    """
    is_auto = not issubclass(model_class, torch.nn.Module)
    draws = has_values(torch.device(device))  # without values a draw that is repeated until it fits never ends
    with torch.device(device), nullcontext() if draws else no_init_weights():
        if is_auto:
            model = model_class.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=dtype)
        else:
            model = model_class._from_config(model_class.config_class.from_pretrained(folder), dtype=dtype)
    if not draws:
        model.tie_weights()
    if model.can_generate():
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        except OSError:  # the file is not there: as the configuration says, which the model has read
            pass
    strictly = model._keep_in_fp32_modules_strict or ()
    cast_saved(
        model,
        dtype,
        in_float32=(*(model._keep_in_fp32_modules or ()), *strictly) if dtype == torch.float16 else strictly,
    )
    return model.eval()


def without_weights(model_class: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A model as `from_configuration` makes it, see `with_parameters_on_meta`. Draws no random numbers."""
    with torch.random.fork_rng(devices=[]), UnfilledOnMeta():
        model = from_configuration(model_class, folder, dtype, "cpu")
    return with_parameters_on_meta(model, device)
