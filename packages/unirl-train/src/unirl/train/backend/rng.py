"""The states of a process's random generators, written and read without pickle."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from unirl.types.devices import accelerator, in_use

# The legacy generator is the one that libraries draw from without being asked.
_NUMPY = numpy.random.mtrand


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON-able values of Python's, NumPy's and torch's global generators, and, under its name, of an
    accelerator that is in use."""
    version, python_words, gauss_next = random.getstate()
    kind, numpy_words, position, has_gauss, cached_gaussian = _NUMPY.get_state(legacy=True)
    tensors = {
        "python": torch.tensor(python_words, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy.asarray(numpy_words).astype("int64")),
        "torch": torch.get_rng_state(),
    }
    if (device := in_use()) is not None:
        tensors[device] = torch.get_device_module(device).get_rng_state()
    values = {
        "python": [version, gauss_next],
        "numpy": [str(kind), int(position), int(has_gauss), float(cached_gaussian)],
    }
    return tensors, values


def set_rng_state(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Put the generators where `rng_state` found them."""
    version, gauss_next = values["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))
    kind, position, has_gauss, cached_gaussian = values["numpy"]
    _NUMPY.set_state((kind, tensors["numpy"].numpy().astype("uint32"), position, has_gauss, cached_gaussian))
    torch.set_rng_state(tensors["torch"])
    here = accelerator()
    if here is not None and here.name in tensors:
        torch.get_device_module(here.name).set_rng_state(tensors[here.name])


def write_rng_state(path: Path, state: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    """One safetensors file; the values are JSON in its header."""
    tensors, values = state
    save_file(tensors, path, metadata={"values": json.dumps(values)})


def read_rng_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_rng_state` wrote."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        values = json.loads(file.metadata()["values"])
    return tensors, values
