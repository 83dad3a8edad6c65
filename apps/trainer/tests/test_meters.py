"""What `trainer bench` reads of the device."""

import time
from contextlib import contextmanager

import pytest
import torch

from unirl.app.bench import _device_observer
from unirl.app.meters import AcceleratorMeter, CPUMeter, Spent, gemm_rate, meter_of


class FakeMeter:
    """A device whose products take half a second each, whatever their size."""

    device = torch.device("cpu")
    gemm_shapes = ((2, 3, 4), (10, 10, 10))
    gemm_flops = 1.0

    @contextmanager
    def measuring(self):
        spent = Spent()
        yield spent
        spent.seconds, spent.peak_bytes = 0.5, 7


def test_the_rate_is_that_of_the_best_shape():
    assert gemm_rate(FakeMeter(), torch.float32, repeats=1) == 2 * 10**3 / 0.5


def test_a_phase_entered_twice_adds_seconds_and_keeps_the_larger_peak():
    found = {"train": Spent(1.0, 9)}
    observe = _device_observer(FakeMeter(), found)
    for name in ("train", "rollout"):
        with observe(name):
            pass
    assert found == {"train": Spent(1.5, 9), "rollout": Spent(0.5, 7)}


def test_the_meter_of_a_cpu_counts_work_and_not_waiting(monkeypatch):
    # A separate clock: threads of other tests in this process may work meanwhile.
    worked = iter([3.0, 3.5])
    monkeypatch.setattr(time, "process_time", lambda: next(worked))
    with CPUMeter().measuring() as spent:
        pass
    assert spent.seconds == 0.5 and spent.peak_bytes is None
    assert isinstance(meter_of("cpu"), CPUMeter) and isinstance(meter_of("cuda:0"), AcceleratorMeter)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_meter_of_a_gpu_waits_for_its_work_and_sees_its_memory():
    meter = meter_of("cuda")
    with meter.measuring() as spent:
        torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
    assert spent.seconds > 0 and spent.peak_bytes is not None and spent.peak_bytes >= 3 * 4096**2 * 4
    assert gemm_rate(meter, torch.bfloat16, repeats=2) > 1e12
