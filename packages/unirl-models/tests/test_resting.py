"""Weights that rest in host memory: copies on the device within a visit, and in their own memory after it."""

import pytest
import torch
from torch import nn

from unirl.models.diffusers_pipeline.resting import Resting


def places(model: nn.Module) -> list[int]:
    return [weight.data_ptr() for weight in (*model.parameters(), *model.buffers())]


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).requires_grad_(False).eval()


def test_weights_are_copied_within_a_visit_and_in_their_own_memory_after_it(model: nn.Module):
    before, x = places(model), torch.randn(4, 3)
    expected = model(x)
    resting = Resting(torch.device("cpu"))
    with resting.visit():
        assert places(model) == before  # nothing needed them yet
        with resting.visit():
            resting.bring([model])
        there = places(model)
        assert not set(there) & set(before)
        resting.bring([model])
        assert places(model) == there
        assert torch.equal(model(x), expected)
    assert places(model) == before
    assert torch.equal(model(x), expected)


def test_weights_come_back_after_an_error(model: nn.Module):
    before, resting = places(model), Resting(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="out of memory"), resting.visit():
        resting.bring([model])
        raise RuntimeError("out of memory")
    assert places(model) == before
