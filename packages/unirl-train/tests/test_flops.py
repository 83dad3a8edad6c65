"""FLOPs of training against counts by hand, and what a run reports of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import FieldBundle, FieldPipeline, rollout, setup, some_advantages
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.train import flops
from unirl.train.flops import FlopCounter, MatrixRates, TrainingRate, published_rates

OF_MACHINE = ("timing_s/", "perf/")


def backend(**changes: Any) -> Any:
    """What a rate asks of a backend."""
    return SimpleNamespace(
        **{"device": torch.device("cpu"), "computes_in_float32": True, "is_compiled": False, **changes}
    )


def test_attention_on_a_cpu_is_counted():
    query = torch.randn(3, 2, 5, 8, requires_grad=True)
    with FlopCounter() as counter:
        out = scaled_dot_product_attention(query, query, query)
    products = 2 * (2 * 3 * 2 * 5 * 5 * 8)
    assert counter.total == products
    with FlopCounter() as counter:
        out.sum().backward()
    assert counter.total == 2 * products


def test_a_linear_layer_computes_two_products_backward_and_one_where_its_input_needs_none():
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    rows = torch.randn(5, 8)
    with FlopCounter() as counter:
        layers(rows).sum().backward()
    first, second = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    assert counter.total == (first + second) + (first + 2 * second)


def test_later_rollouts_have_a_rate_and_the_first_is_counted(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(flops.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(flops, "published_rates", lambda name: MatrixRates(half=8e3, single=1e3))
    rate = TrainingRate(backend())
    matrix = torch.ones(4, 5)
    with rate.measured("image") as first:
        matrix @ matrix.T
        rate.num_terms += 10
    with rate.measured("image") as second:
        rate.num_terms += 30
    # 2 x 4 x 5 x 4 FLOPs for 10 terms: 480 for 30, in two seconds.
    assert first == {}
    assert second == pytest.approx({"perf/train_tflops": 240 / 1e12, "perf/train_mfu": 0.24})


@pytest.mark.parametrize("changes", [{"is_compiled": True}, {"device": "pretend"}])
def test_what_would_run_in_another_way_is_not_counted(changes: dict[str, Any]):
    rate = TrainingRate(backend(**changes))
    for _ in range(2):
        with rate.measured("image") as metrics:
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert metrics == {}


def test_a_counted_rollout_trains_as_one_that_is_not():
    response = with_advantages(rollout(FieldPipeline(FieldBundle().model)), some_advantages(6))
    found = []
    for is_compiled in (False, True):
        made = setup(DiffusionGRPO, updates=3, micro=2)
        made.stack._rate = TrainingRate(backend(is_compiled=is_compiled))
        results = [made.stack.train(response, progress=0.0) for _ in range(2)]
        assert ["perf/train_tflops" in result.metrics for result in results] == [False, not is_compiled]
        assert "timing_s/compile" not in results[0].metrics
        of_training = [
            {name: value for name, value in result.metrics.items() if not name.startswith(OF_MACHINE)}
            for result in results
        ]
        found.append((made.parameters, of_training))
    (counted, metrics), (plain, expected) = found
    assert metrics == expected
    assert all(torch.equal(value, plain[name]) for name, value in counted.items())


def test_a_device_is_found_by_the_name_that_pytorch_has_for_it():
    assert published_rates("NVIDIA H100 80GB HBM3") == MatrixRates(989e12, 67e12)
    assert published_rates("NVIDIA H100 PCIe") == MatrixRates(756e12, 51e12)
    assert published_rates("NVIDIA GeForce GT 710") is None
    assert published_rates(None) is None
