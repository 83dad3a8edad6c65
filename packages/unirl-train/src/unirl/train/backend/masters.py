"""Mixed precision on one device: weights that compute, and masters of what they lose by rounding.

FSDP2 does the same by gathering every block in `param_dtype` at each forward; where nothing is sharded its copies and
hooks are pure cost. Gradients and updates are those of FSDP2, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn


class Masters:
    """The floating-point parameters of modules in the dtypes that they are kept in, where they compute in another.

    Parameters of the modules are rounded to `dtype`, in place. A gradient is added to the master of its parameter in
    the master's dtype, as soon as the backward has it, and the parameter keeps none.

    modules: by component, with values. dtype: what they compute in.
    """

    def __init__(self, modules: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
        self._computing: dict[str, nn.Parameter] = {}
        self.of: dict[str, nn.Parameter] = {}
        """Master by "component.name", of trainable and of frozen parameters; None of those that are kept in `dtype`."""
        for component, module in modules.items():
            for name, parameter in module.named_parameters():
                if parameter.is_floating_point() and parameter.dtype != dtype:
                    master = nn.Parameter(parameter.data, parameter.requires_grad)
                    parameter.data = parameter.data.to(dtype)
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))
                    self._computing[f"{component}.{name}"], self.of[f"{component}.{name}"] = parameter, master

    @torch.no_grad()
    def follow(self) -> None:
        """Round what trains again. Call after masters have changed."""
        trained = [name for name, master in self.of.items() if master.requires_grad]
        if trained:
            torch._foreach_copy_([self._computing[name] for name in trained], [self.of[name] for name in trained])

    def move(self, device: torch.device) -> None:
        """Move masters with their gradients; the modules move as any."""
        for master in self.of.values():
            master.data = master.data.to(device)
            if master.grad is not None:
                master.grad.data = master.grad.data.to(device)


def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    gradient = parameter.grad
    if gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
    parameter.grad = None
