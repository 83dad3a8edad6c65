"""What passes through the driver in an asynchronous run on pools: ids and numbers, in proportion to members."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from unirl.types.batch import Batch

BENCH = Path(__file__).parents[3] / "apps" / "trainer" / "bench"
NUM_ROLLOUTS = 3


def values_of(value: Any, num_samples: int) -> list[tuple[int, int]]:
    """(numbers, samples of the batch around it) of every tensor inside. num_samples: where there is no batch."""
    if isinstance(value, Tensor):
        return [(value.numel(), num_samples)]
    if isinstance(value, Batch):
        inside = [getattr(value, name) for name in value.kinds()]
        return [each for part in inside for each in values_of(part, max(1, value.batch_size))]
    if isinstance(value, Mapping):
        return [each for part in value.values() for each in values_of(part, num_samples)]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [each for part in value for each in values_of(part, num_samples)]
    if hasattr(value, "args"):  # what a member is asked
        return values_of([*value.args, *value.kwargs.values()], num_samples)
    return []


def run(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> tuple[list[tuple[int, int]], dict[str, int], float]:
    """Tensors that passed, calls by method, and bytes, of a whole run."""
    monkeypatch.syspath_prepend(str(BENCH))
    driver_scale: Any = importlib.import_module("driver_scale")

    passed: list[tuple[int, int]] = []
    sizes = driver_scale.Sizes(num_gpus)
    share = sizes.batch_size * driver_scale.REPEATS // sizes.num_even
    wire = driver_scale.Wire(seen=lambda value: passed.extend(values_of(value, share)))
    steps = driver_scale.steps_of(sizes, NUM_ROLLOUTS, wire, lambda: 0.0)
    assert len(steps) == NUM_ROLLOUTS
    return passed, wire.calls_by_method, float(wire.num_bytes)


@pytest.fixture(autouse=True)
def forget_the_bench():
    yield
    for name in ("driver_scale", "idle_roles", "virtual_time"):
        sys.modules.pop(name, None)


def test_only_ids_and_numbers_pass_through_the_driver(monkeypatch: pytest.MonkeyPatch):
    passed, _, _ = run(monkeypatch, 16)
    assert len(passed) > 100, "rewards, versions, counts and advantages"
    assert all(numbers <= num_samples for numbers, num_samples in passed)


def test_calls_and_bytes_grow_with_the_members(monkeypatch: pytest.MonkeyPatch):
    _, few, few_bytes = run(monkeypatch, 8)
    _, many, many_bytes = run(monkeypatch, 32)
    grows = {name: many[name] / few[name] for name in few}
    exchanged = grows.pop("pick")  # grows with the pairs of workers that exchange rows, up to the samples
    assert all(factor <= 4 for factor in grows.values()), grows
    assert exchanged <= 16
    assert many_bytes <= 5 * few_bytes
