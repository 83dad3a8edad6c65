"""States of random generators: those of an accelerator are kept under its name."""

import random

import numpy
import torch

from unirl.train.backend import rng
from unirl.types.device_kinds import KINDS


class Module:
    """Torch's module of an accelerator, with a generator of one byte."""

    state = torch.tensor([7], dtype=torch.uint8)

    def get_rng_state(self):
        return self.state

    def set_rng_state(self, state):
        self.state = state


def drawn():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_generators_continue_where_they_were(tmp_path):
    file = tmp_path / "rng.safetensors"
    rng.write_rng_state(file, rng.rng_state())
    first = drawn()
    rng.set_rng_state(*rng.read_rng_state(file))
    assert drawn() == first


def test_the_generator_of_an_accelerator_continues_on_its_kind_alone(monkeypatch):
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", {"xpu": module, "npu": module}.__getitem__)
    monkeypatch.setattr(rng, "in_use", lambda: "xpu")
    tensors, values = rng.rng_state()
    assert set(tensors) == {"python", "numpy", "torch", "xpu"}
    module.state = torch.tensor([1], dtype=torch.uint8)
    monkeypatch.setattr(rng, "accelerator", lambda: KINDS["npu"])
    rng.set_rng_state(tensors, values)
    assert module.state.tolist() == [1]
    monkeypatch.setattr(rng, "accelerator", lambda: KINDS["xpu"])
    rng.set_rng_state(tensors, values)
    assert module.state.tolist() == [7]
