"""Models built from their configuration, with no weights read: for rehearsals, and to be filled later."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from unirl.models.extras import from_extra
from unirl.types.errors import ContractError

with from_extra("diffusers"):
    import transformers
    from diffusers.models.modeling_utils import ModelMixin, no_init_weights


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


def without_weights(model_class: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A model as `from_configuration` makes it, with its parameters on the meta device; buffers, and what else its
    constructor computes, have their values, buffers on `device`.

    Draws as many random numbers as `from_pretrained` does. Raises ContractError for a model that makes more than
    parameters without values.
    """
    with torch.random.fork_rng(devices=[], enabled=not issubclass(model_class, ModelMixin)):
        # diffusers draws what a constructor draws by itself; transformers constructs on the meta device.
        with no_init_weights(), _UnfilledOnMeta():
            model = from_configuration(model_class, folder, dtype, "cpu")
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = shared.setdefault(
                    parameter, nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                )
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None:
                _require_values(type(model), path, name, buffer)
                module._buffers[name] = buffer.to(device)
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                _require_values(type(model), path, name, value)
    return model


class TrueOnMeta(TorchDispatchMode):
    """Inside, a condition on a tensor of the meta device, which has no values, is true, so that a forward goes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: of any call
        is_read = func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta
        return True if is_read else func(*args, **({} if kwargs is None else kwargs))


class _UnfilledOnMeta(TorchFunctionMode):
    """Tensors that are made without values are on the meta device: parameters, before they are initialised."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: of any call
        kwargs = {} if kwargs is None else kwargs
        return func(*args, **{**kwargs, "device": "meta"}) if func is torch.empty else func(*args, **kwargs)


def _require_values(model_class: type, path: str, name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ContractError(f"{model_class.__name__}.{path}.{name} has no value after construction")


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
    if model.can_generate():
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        except OSError:  # the file is not there: as the configuration says, which the model has read
            pass
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
