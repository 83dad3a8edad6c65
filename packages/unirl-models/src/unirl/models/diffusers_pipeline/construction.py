"""Components of pipelines that are built from their configuration, with no weights read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unirl.models.causal_lm import construction as of_transformers
from unirl.models.construction import UnfilledOnMeta, cast_saved, with_parameters_on_meta
from unirl.models.extras import from_extra

with from_extra("diffusers"):
    from diffusers.models.modeling_utils import ModelMixin, no_init_weights


def from_configuration(model_class: Any, folder: Path, dtype: torch.dtype, device: str | torch.device) -> Any:
    """A model in evaluation mode on `device`, of the configuration in `folder`, in the dtypes that `from_pretrained`
    with `dtype` would give its weights; values are those of its constructor.

    model_class: of diffusers, or of transformers (Any: they share no base class).
    """
    if not issubclass(model_class, ModelMixin):
        return of_transformers.from_configuration(model_class, folder, dtype, device)
    config = model_class.load_config(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class.from_config(config)
    finally:
        torch.set_default_dtype(before)
    cast_saved(model, dtype, in_float32=model_class._keep_in_fp32_modules or ())
    return model.eval()


def without_weights(model_class: type[ModelMixin], folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of diffusers as `from_configuration` makes it, see `with_parameters_on_meta` (Any: without a class that
    says what its families have).

    Draws the random numbers that `from_pretrained` draws: those of the constructor, and none to initialise.
    """
    with no_init_weights(), UnfilledOnMeta():
        model = from_configuration(model_class, folder, dtype, "cpu")
    return with_parameters_on_meta(model, device)
