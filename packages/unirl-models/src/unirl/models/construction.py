"""Models that are built from their configuration, to be filled later: what their libraries have in common."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from unirl.types.errors import ContractError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class UnfilledOnMeta(TorchFunctionMode):
    """Tensors that are made without values are on the meta device: parameters, before they are initialised."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: of any call
        kwargs = {} if kwargs is None else kwargs
        return func(*args, **{**kwargs, "device": "meta"}) if func is torch.empty else func(*args, **kwargs)


class TrueOnMeta(TorchDispatchMode):
    """Inside, a condition on a tensor of the meta device, which has no values, is true, so that a forward goes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: of any call
        is_read = func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta
        return True if is_read else func(*args, **({} if kwargs is None else kwargs))


def with_parameters_on_meta(model: ModuleT, device: torch.device) -> ModuleT:
    """A model that was made inside `UnfilledOnMeta` with all its parameters on the meta device, in place; buffers, and
    what else its constructor has computed, have their values, buffers on `device`.

    Raises ContractError for a model that makes more than parameters without values.
    """
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


def _require_values(model_class: type, path: str, name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ContractError(f"{model_class.__name__}.{path}.{name} has no value after construction")


def cast_saved(model: nn.Module, dtype: torch.dtype, *, in_float32: Collection[str]) -> None:
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
