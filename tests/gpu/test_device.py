"""What UniRL asks of an accelerator holds on this machine's."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from unirl.app.command_line import Command
from unirl.app.conformance.checks import replay_gap
from unirl.app.conformance.matrix import running
from unirl.app.device_report.report import REDUCED
from unirl.app.recipe import checked, composed
from unirl.train.backend.rng import rng_state, set_rng_state
from unirl.types.device_kinds import kind_of
from unirl.types.devices import collectives_of, current_stream, in_use, num_devices, require_device

pytestmark = pytest.mark.gpu


def built(name, device):
    recipe, *words = REDUCED[name].words(device, Path())
    return running(checked(composed(Command("bench", recipe, tuple(words)))))


def test_the_accelerator_is_counted_and_in_use_after_its_first_tensor(device):
    require_device(device)
    assert num_devices(device) >= 1
    torch.zeros(1, device=device)
    assert in_use() == device
    assert (current_stream() is not None) == kind_of(device).has_many


@pytest.mark.parametrize("name", REDUCED)
def test_replayed_log_probs_of_float32_are_those_of_a_cpu(name, device):
    """Samples of the CPU, whose noise is the same everywhere; 1e-4 nats are the rounding of other kernels."""
    with built(name, "cpu") as here:
        track = here.sampled(here.request(0))
        assert float(replay_gap(here.pipeline, track).max()) < 1e-5
    with built(name, device) as there:
        assert next(iter(there.backend.parameters.values())).device.type == device
        assert float(replay_gap(there.pipeline, track.to(torch.device(device))).max()) < 1e-4


@pytest.mark.parametrize("name", REDUCED)
def test_samples_of_the_accelerator_are_replayed_and_train(name, device):
    with built(name, device) as run:
        track = run.sampled(run.request(0))
        assert float(replay_gap(run.pipeline, track).max()) < 1e-4
        before = [parameter.detach().clone() for parameter in run.backend.parameters.values()]
        metrics = run.trainer.step(0)
        assert metrics["policy/first_ratio_max_abs_dev"] < 1e-4
        assert any(not torch.equal(old, new) for old, new in zip(before, run.backend.parameters.values(), strict=True))


def test_its_generator_continues_where_it_was_saved(device):
    torch.rand(3, device=device)
    state = rng_state()
    assert device in state[0]
    first = torch.rand(3, device=device)
    set_rng_state(*state)
    assert torch.equal(torch.rand(3, device=device), first)


def test_tensors_of_the_host_and_of_the_device_take_part_in_collectives(device):
    if not kind_of(device).has_many:
        pytest.skip(f"{device} has no collectives")
    dist.init_process_group(collectives_of(device), store=dist.HashStore(), rank=0, world_size=1)
    try:
        for place in ("cpu", device):
            value = torch.full((3,), 2.0, device=place)
            dist.all_reduce(value)
            assert value.tolist() == [2.0] * 3
    finally:
        dist.destroy_process_group()
