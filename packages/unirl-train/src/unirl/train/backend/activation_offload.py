"""What blocks keep for their backward rests in host memory between the two.

Copies run on a separate stream: those to the host while the next block computes, those back while the block after it
has its backward. The device holds the activations of two blocks: the two that ran last, or the one whose backward runs
and the one before it.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from unirl.train import host_memory

SMALLEST_BYTES = 16384
"""A smaller tensor stays: starting its copy takes as long as making it again."""
LARGEST_SHARE = 16
"""A tensor whose storage is more than so many times larger stays, since storages are moved whole."""

Value = Any  # Any: arguments and results of any block, streams and events of any device


def offload_activations(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Let outermost blocks keep what they save in host memory, in place. Parameters stay, as do small tensors.

    Called after `checkpoint_activations`: what a block that is recomputed keeps is moved then.
    """
    inside = {id(child) for block in blocks for child in block.modules() if child is not block}
    host = _Host(device)
    for block in blocks:
        if id(block) not in inside:
            block.forward = functools.partial(_run, host, block.forward)


def is_offloaded(forward: Callable[..., object]) -> bool:
    """True for a forward that `offload_activations` has replaced."""
    return isinstance(forward, functools.partial) and forward.func is _run


def _run(host: _Host, forward: Callable[..., Value], *args: Value, **kwargs: Value) -> Value:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    kept = host.begin()
    with saved_tensors_hooks(kept.pack, kept.unpack):
        result = forward(*args, **kwargs)
    host.end(kept)
    return result


class _Storage:
    """One storage that blocks keep: on the device, on the host, or on both."""

    def __init__(self, flat: Tensor) -> None:
        self.origin = weakref.ref(flat.untyped_storage())
        """The storage that it is a copy of, while that lives."""
        self.on_device: Tensor | None = flat
        self.on_host = host_memory.host_memory(flat)


@dataclass(frozen=True)
class _View:
    """A tensor within a storage."""

    storage: _Storage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept:
    """What one forward of a block saved."""

    def __init__(self, host: _Host, before: _Kept | None) -> None:
        self._host = host
        self._before = None if before is None else weakref.ref(before)
        self.storages: dict[int, _Storage] = {}
        self.copied: Value = None
        """Event after the copies to the host; None where there is no stream."""
        self._arrives: Value = None
        self._is_back = False

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """What the graph holds instead of a tensor."""
        if not _is_moved(tensor):
            return tensor.detach()  # itself may be a result, which would keep itself alive
        storage = self._host.storage_of(tensor.detach())
        self.storages[id(storage)] = storage
        return _View(storage, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, held: Tensor | _View) -> Tensor:
        """The tensor again. The first one brings back all that the block saved, and starts with the block before."""
        if isinstance(held, Tensor):
            return held
        self.bring_back()
        if self._arrives is not None:
            self._host.wait(self._arrives)
            self._arrives = None
        if held.storage.on_device is None:
            raise RuntimeError("saved tensors of a block left the device while its backward runs")
        before = None if self._before is None else self._before()
        if before is not None:
            before.bring_back()
        return held.storage.on_device.as_strided(held.size, held.stride, held.offset)

    def leave(self) -> None:
        """Free the device's copies: those on the host are complete, or complete before what runs next."""
        if not self._is_back:
            self._host.wait(self.copied)
            for storage in self.storages.values():
                storage.on_device = None

    def bring_back(self) -> None:
        """Start to copy what is not on the device. Does nothing the second time."""
        if not self._is_back:
            self._is_back = True
            missing = [storage for storage in self.storages.values() if storage.on_device is None]
            self._arrives = self._host.copy_back(missing)


class _Host:
    """Copies what the blocks of one model keep, in the order in which they run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Value = None
        self._known: weakref.WeakValueDictionary[tuple[int, int, torch.dtype], _Storage] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Kept] | None = None
        self._leaving: deque[weakref.ref[_Kept]] = deque()

    def begin(self) -> _Kept:
        """Before a block's forward: what the block before the last one kept leaves the device."""
        while len(self._leaving) > 1:
            earlier = self._leaving.popleft()()
            if earlier is not None:
                earlier.leave()
        before = None if self._last is None else self._last()
        kept = _Kept(self, before)
        self._last = weakref.ref(kept)
        return kept

    def end(self, kept: _Kept) -> None:
        """After it."""
        if self._stream is not None:
            kept.copied = self._stream.record_event()
        self._leaving.append(weakref.ref(kept))

    def storage_of(self, tensor: Tensor) -> _Storage:
        """The storage of a tensor, whose copy to the host begins unless another tensor of it began one."""
        origin = tensor.untyped_storage()
        name = (origin._cdata, tensor._version, tensor.dtype)
        known = self._known.get(name)
        if known is not None and known.origin() is origin:
            return known
        flat = tensor.as_strided((origin.nbytes() // tensor.itemsize,), (1,), 0)
        made = self._known[name] = _Storage(flat)
        with self._streaming():
            made.on_host.copy_(flat, non_blocking=True)
        return made

    def copy_back(self, storages: Sequence[_Storage]) -> Value:
        """Event after the copies; None where nothing is to be awaited."""
        for storage in storages:
            storage.on_device = torch.empty_like(storage.on_host, device=self._device, pin_memory=False)
        with self._streaming():
            for storage in storages:
                if storage.on_device is not None:
                    storage.on_device.copy_(storage.on_host, non_blocking=True)
                    if self._stream is not None:
                        # Or, if no backward asks for it, the memory could be given away while the copy runs.
                        storage.on_device.record_stream(self._stream)
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: Value) -> None:
        """Let what is computed from now on wait for an event."""
        if event is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(event)

    def _streaming(self) -> Value:
        """Within it copies run on the separate stream, after all that was computed before."""
        if not host_memory.has_streams(self._device):
            return nullcontext()
        module = torch.get_device_module(self._device)
        if self._stream is None:
            self._stream = module.Stream(self._device)
        self._stream.wait_stream(module.current_stream(self._device))
        return module.stream(self._stream)


def _is_moved(tensor: Tensor) -> bool:
    """False for parameters, which FSDP frees itself, and for what is too small or too small a part of its storage."""
    base = tensor._base if tensor._base is not None else tensor
    if isinstance(base, nn.Parameter):
        return False
    num_bytes = tensor.untyped_storage().nbytes()
    return SMALLEST_BYTES <= num_bytes <= LARGEST_SHARE * tensor.numel() * tensor.itemsize
