"""LoRA adapters: where they go, how they are switched off, how their weights are named and merged."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from unirl.train.configs import LoraConfig
from unirl.types.errors import ConfigError, ContractError

ADAPTER = "default"
_A = f".lora_A.{ADAPTER}.weight"
_B = f".lora_B.{ADAPTER}.weight"
BASE_LAYER = ".base_layer."
"""Between the name of an adapted layer and those of its own weights."""


def _peft() -> ModuleType:
    try:
        import peft
        import peft.tuners.tuners_utils
    except ImportError as error:
        raise ConfigError(
            f"lora needs peft, which cannot be imported ({error}). Install it with `pip install 'unirl-train[peft]'`, "
            "or remove lora for full fine-tuning."
        ) from error
    return peft


def inject_lora(
    modules: Mapping[str, nn.Module], config: LoraConfig, targets: Sequence[str], *, is_fused: bool = False
) -> None:
    """Freeze the modules and add adapters to their linear layers whose name ends in one of `targets`, in place.

    A module on the meta device gets adapters without values. is_fused: in two operators each (`train.fused_lora`).
    Raises ConfigError if a component has no such layer, if a target that the recipe names matches nothing, and
    for a target that is no nn.Linear.
    """
    peft = _peft()
    matched: set[str] = set()
    for component, module in modules.items():
        found = {name: target for name, _ in module.named_modules() for target in targets if _ends_in(name, target)}
        if not found:
            raise ConfigError(_nothing_matched(component, module, targets))
        for name in found:
            layer = module.get_submodule(name)
            if not isinstance(layer, nn.Linear):
                raise ConfigError(
                    f"lora target {component}.{name} is a {type(layer).__name__}, no nn.Linear. "
                    "Name the linear layers inside it in lora.target_modules."
                )
        matched.update(found.values())
        module.requires_grad_(False)
        # Adapters of weights that are read later are drawn later too (`factors_as_drawn`).
        chosen = _peft_config(config, targets)
        if is_fused:
            chosen._register_custom_module({nn.Linear: _fused_layer()})
        peft.inject_adapter_in_model(chosen, module, adapter_name=ADAPTER, low_cpu_mem_usage=is_empty(module))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.endswith((_A, _B)))
    unmatched = [target for target in targets if target not in matched]
    if unmatched and config.target_modules is not None:
        raise ConfigError(_nothing_matched("/".join(modules), next(iter(modules.values())), unmatched))


def _fused_layer() -> type[nn.Module]:
    from unirl.train.fused_lora import FusedLoraLinear  # imports peft, which may not be there

    return FusedLoraLinear


def is_empty(module: nn.Module) -> bool:
    """True if parameters of a module wait for their values on the meta device."""
    return any(parameter.is_meta for parameter in module.parameters())


def _peft_config(config: LoraConfig, targets: Sequence[str]) -> Any:  # Any: peft is imported where it is used
    return _peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
    )


def adapter_layers(module: nn.Module) -> list[nn.Module]:
    """The adapted layers, in the order in which `inject_lora` adds adapters."""
    layer_class = _peft().tuners.tuners_utils.BaseTunerLayer
    return [layer for layer in module.modules() if isinstance(layer, layer_class)]


def factors_as_drawn(layer: nn.Module, config: LoraConfig) -> list[tuple[nn.Parameter, Tensor]]:
    """The factors of an adapted layer, each with the whole of what `inject_lora` would have given it, on the CPU.

    Draws the random numbers that the injection of one layer draws.
    """
    base = layer.get_parameter("base_layer.weight")
    num_outputs, num_inputs = base.shape
    stand_in = nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
    # Of no memory, and of the dtype that peft rounds the factors to.
    weight = torch.zeros((), dtype=base.dtype).expand(num_outputs, num_inputs)
    stand_in.weight = nn.Parameter(weight, requires_grad=False)
    drawn = nn.ModuleDict({"layer": stand_in})
    _peft().inject_adapter_in_model(_peft_config(config, ["layer"]), drawn, adapter_name=ADAPTER)
    names = [f"{kind}.{ADAPTER}.weight" for kind in ("lora_A", "lora_B")]
    return [(layer.get_parameter(name), drawn.get_parameter(f"layer.{name}").detach()) for name in names]


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _nothing_matched(component: str, module: nn.Module, targets: Sequence[str]) -> str:
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return (
        f"lora.target_modules {list(targets)} match no layer of {component}. "
        f"Linear layers it has: {', '.join(linear[:6]) or 'none'}{', ...' if len(linear) > 6 else ''}."
    )


@contextmanager
def adapters_disabled(modules: Mapping[str, nn.Module]) -> Generator[None]:
    """Inside, adapted layers compute as their base layer alone. requires_grad and the active adapter never change.

    peft's own switch (`enable_adapters`) also sets requires_grad of the adapters, which an optimizer must not see.
    """
    layers = [layer for module in modules.values() for layer in adapter_layers(module)]
    _switch(layers, is_disabled=True)
    try:
        yield
    finally:
        _switch(layers, is_disabled=False)


def _switch(layers: Sequence[nn.Module], *, is_disabled: bool) -> None:
    for layer in layers:
        # A plain attribute, which peft's forward reads through its property of the public name.
        vars(layer)["_disable_adapters"] = is_disabled
        if layer.disable_adapters is not is_disabled:
            raise ContractError("this version of peft cannot switch adapters off without changing requires_grad")


def plain_lora_name(name: str) -> str:
    """ "x.lora_A.default.weight" as peft saves it: "x.lora_A.weight"."""
    for marked in (_A, _B):
        if name.endswith(marked):
            return name.removesuffix(marked) + marked.replace(f".{ADAPTER}", "")
    raise ContractError(f"{name} is no LoRA parameter")


def plain_base_name(name: str) -> str | None:
    """Name of a parameter as the model had it before adapters; None for a parameter of an adapter."""
    return None if name.endswith((_A, _B)) else name.replace(BASE_LAYER, ".")


def is_first_factor(name: str) -> bool:
    """True for the factor A of an adapter, which reads the layer's inputs."""
    return name.endswith(_A)


def is_second_factor(name: str) -> bool:
    """True for the factor B of an adapter, which makes the layer's outputs."""
    return name.endswith(_B)


def lora_factor_names(base_name: str) -> tuple[str, str]:
    """Names of A and B next to the base weight "x.base_layer.weight"."""
    layer = base_name.removesuffix(f"{BASE_LAYER}weight")
    return layer + _A, layer + _B


def is_adapted(name: str) -> bool:
    """True if a parameter is the base weight of an adapted layer."""
    return name.endswith(f"{BASE_LAYER}weight")
