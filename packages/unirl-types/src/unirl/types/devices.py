"""What code asks of a device, so that none is named elsewhere: by torch, where `device_kinds` is without it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from unirl.types.device_kinds import KINDS, ONE_DEVICE_ALONE, PRETEND, DeviceKind, kind_of, lacks
from unirl.types.errors import ConfigError


def is_accelerator(device: str | torch.device) -> bool:
    """True for a device with memory separate from the host's: a GPU, or the one that a rehearsal pretends to have."""
    return type_of(device) not in ("cpu", "meta")


def type_of(device: str | torch.device) -> str:
    """The type of a device, be it one that this torch does not have."""
    return device.type if isinstance(device, torch.device) else device.partition(":")[0]


def has_values(device: str | torch.device) -> bool:
    """False for the pretend device of a rehearsal, on which models are built and no weights are read."""
    return type_of(device) != PRETEND


def copy_together(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each tensor into its place. Those that are on its device and of its dtype take few launches, however many.

    places: changed in place.
    """
    pairs = list(zip(places, tensors, strict=True))
    is_near = [place.device == tensor.device and place.dtype == tensor.dtype for place, tensor in pairs]
    near = [(_bits(place), _bits(tensor)) for (place, tensor), is_it in zip(pairs, is_near, strict=True) if is_it]
    if near:
        torch._foreach_copy_([place for place, _ in near], [tensor for _, tensor in near])
    for (place, tensor), is_it in zip(pairs, is_near, strict=True):
        if not is_it:
            place.copy_(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, for which every device has every kernel."""
    return tensor.detach().view(INTEGERS[tensor.element_size()]) if tensor.element_size() in INTEGERS else tensor


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that hold the bits of an element, by its bytes."""


def empty_cache(device: str | torch.device) -> None:
    """Return the memory that the device's allocator keeps without using it; nothing on a CPU."""
    if is_accelerator(device):
        torch.get_device_module(torch.device(device)).empty_cache()


def has_ragged_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """True if one kernel attends within samples of any lengths there; else samples of one length share a call."""
    return (
        is_accelerator(device)
        and dtype in (torch.float16, torch.bfloat16)
        and kind_of(device.type).has_ragged_attention
    )


def wide_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has none."""
    return torch.float64 if not is_accelerator(device) or kind_of(device.type).has_float64 else torch.float32


def widened(values: torch.Tensor) -> torch.Tensor:
    """The values in `wide_float` of their device, for sums whose rounding must not show."""
    return values.to(wide_float(values.device))


# This process and its accelerator -------------------------------------------------------------------------------------


def accelerator() -> DeviceKind | None:
    """The kind of this machine's accelerator, or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type != PRETEND:
        return KINDS.get(found.type)
    if found is None:
        return None
    # A rehearsal has registered its device, which hides the others.
    return next((kind for kind in KINDS.values() if kind.is_accelerator and num_devices(kind.name)), None)


def num_devices(device: str) -> int:
    """Number of devices of a kind that this process sees; 0 where this torch has no such device."""
    kind = kind_of(device)
    if not kind.is_accelerator:
        return 1
    try:
        module = torch.get_device_module(kind.name)
    except RuntimeError:
        return 0
    return module.device_count() if module.is_available() else 0


def require_device(device: str) -> None:
    """Raise ConfigError if this process cannot compute on the device, with what is missing."""
    kind = kind_of(device)
    if kind.name == PRETEND or num_devices(device):
        return
    here = accelerator()
    instead = f"device: {'cpu' if here is None else here.name}"
    extension = "" if kind.extension is None else f" and {kind.extension}, installed for that torch"
    raise ConfigError(
        f"device: {kind.name} ({kind.hardware}) is not here: torch {torch.__version__} finds none. It needs the "
        f"device, its driver, a torch that is built for it{extension}. Mend that, or set {instead}."
    )


def in_use() -> str | None:
    """Type of the accelerator that this process computes on; None before its first use, and on a CPU."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type not in KINDS:
        return None
    module = torch.get_device_module(found.type)
    # Apple's is started with the process.
    is_started = module.is_initialized() if KINDS[found.type].has_many else module.is_available()
    return found.type if is_started else None


def current_stream() -> torch.Stream | None:
    """The stream that this thread computes on; None where there is only one."""
    kind = in_use()
    return torch.accelerator.current_stream() if kind is not None and KINDS[kind].has_many else None


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Compute on a stream of `current_stream`."""
    return nullcontext() if stream is None else stream


def collectives_of(device: str | torch.device) -> str:
    """The backends of a process group for tensors on the host and on a device.

    Raises ConfigError for a device whose tensors take part in none.
    """
    kind = kind_of(type_of(device))
    if not kind.has_many:
        raise ConfigError(lacks(kind.name, "collectives, which FSDP needs", ONE_DEVICE_ALONE))
    return "gloo" if kind.collectives == "gloo" else f"cpu:gloo,{kind.name}:{kind.collectives}"


def device_name(device: str | torch.device) -> str | None:
    """The product name of an accelerator; None for a CPU, and where torch does not tell."""
    name = type_of(device)
    if not is_accelerator(name) or not has_values(name) or not kind_of(name).has_many:
        return None
    return torch.get_device_module(name).get_device_name()


# Rehearsals ----------------------------------------------------------------------------------------------------------

_on_host: ContextVar[bool] = ContextVar("on_host", default=False)


def is_on_host() -> bool:
    """True if what the pretend device makes now stands for host memory."""
    return _on_host.get()


@contextmanager
def building_on(device: str | torch.device, *, of: str | torch.device) -> Generator[torch.device]:
    """The device to build a part of a model on, most of which is on `of`: `device`, but the pretend one in a rehearsal,
    where what is made stands for memory of the host if `device` is the host."""
    if has_values(of):
        yield torch.device(device)
        return
    token = _on_host.set(not is_accelerator(device))
    try:
        yield torch.device(of)
    finally:
        _on_host.reset(token)
