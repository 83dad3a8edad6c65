"""Moments that rest on the host: the same bits, few of them on the device at a time, checkpoints of either kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_fakes import TinyBundle, make_backend, snapshot, train_step

from unirl.train import hosted_states
from unirl.train.backend import fsdp
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import FSDPConfig
from unirl.train.optim import make_adamw, move_optimizer
from unirl.types.errors import ConfigError
from unirl.types.training import OptimizerConfig

SHAPES = ((48, 256), (30, 160), (50, 96), (7,), (16, 8, 3, 3))
FORMS: dict[str, dict[str, Any]] = {
    **{form: {"implementation": form} for form in ("fused", "foreach", "loop")},
    **{states: {"states": states} for states in ("8bit", "bf16")},
}


def stepped(device: str = "cpu", **options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Parameters after four steps, of which one has no gradient of the third parameter."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]
    optimizer = make_adamw(parameters, OptimizerConfig(1e-2, weight_decay=0.1, **options))
    for step in range(4):
        for place, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            if (step, place) == (1, 2):
                parameter.grad = None
        optimizer.step()
    return parameters, optimizer


def assert_equal(found: tuple[list[nn.Parameter], Any], expected: tuple[list[nn.Parameter], Any]) -> None:
    for own, theirs in zip(found[0], expected[0], strict=True):
        assert torch.equal(own, theirs)
        states, others = found[1].state[own], expected[1].state[theirs]
        assert states.keys() == others.keys()
        assert all(torch.equal(states[name].cpu(), others[name].cpu()) for name in states)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("visit_bytes", [1, 60_000, 1 << 27])
def test_steps_have_the_bits_of_the_optimizer_alone(form: str, visit_bytes: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(hosted_states, "VISIT_BYTES", visit_bytes)
    assert_equal(stepped(offload=True, **FORMS[form]), stepped(**FORMS[form]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_has_the_same_bits_and_keeps_no_moments(form: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(hosted_states, "VISIT_BYTES", 60_000)
    found = stepped("cuda", offload=True, **FORMS[form])
    assert_equal(found, stepped("cuda", **FORMS[form]))
    moments = [value for state in found[1].state.values() for name, value in state.items() if name != "step"]
    assert all(value.is_pinned() for value in moments)


def test_few_moments_are_on_the_device_at_a_time(monkeypatch: Any) -> None:
    """At most those of three, of eight parameters whose moments come one by one."""
    monkeypatch.setattr(hosted_states, "VISIT_BYTES", 1)
    parameters = [nn.Parameter(torch.randn(16, 16)) for _ in range(8)]
    optimizer = make_adamw(parameters, OptimizerConfig(1e-2, offload=True))
    visits: list[Any] = []
    held: list[int] = []
    arriving = optimizer._arriving  # ty: ignore[missing-attribute]: of the class that is tested

    def noted(coming: Any) -> Any:
        visits.append(arriving(coming))
        held.append(sum(bool(visit.states) for visit in visits if visit is not None))
        return visits[-1]

    optimizer._arriving = noted  # ty: ignore[missing-attribute]: as above
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert len(visits) == 9 and visits[-1] is None
    assert max(held) == 3 and not any(visit.states for visit in visits[:-1])


def test_moving_the_optimizer_leaves_what_rests_on_the_host() -> None:
    parameters, optimizer = stepped(offload=True)
    before = [dict(optimizer.state[parameter]) for parameter in parameters]
    move_optimizer(optimizer, torch.device("meta"))
    assert all(
        value is before[place][name]
        for place, parameter in enumerate(parameters)
        for name, value in optimizer.state[parameter].items()
    )


@pytest.mark.parametrize("was_hosted", [True, False])
def test_a_checkpoint_resumes_with_moments_here_or_there(was_hosted: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fsdp, "check_offload", lambda *args, **kwargs: None)  # which a CPU refuses

    def made(offload: bool) -> tuple[Any, TinyBundle]:
        bundle = TinyBundle()
        return make_backend(bundle, optimizer=OptimizerConfig(1e-2, offload=offload)), bundle

    first, bundle = made(was_hosted)
    for step in range(2):
        train_step(first, bundle.model, step)
    Checkpointer(first, str(tmp_path)).save(2, {})
    second, other = made(not was_hosted)
    Checkpointer(second, str(tmp_path)).load()
    states: list[dict[str, Tensor]] = []
    for backend, own in ((first, bundle), (second, other)):
        train_step(backend, own.model, 2)
        states.append(snapshot(backend))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items() if name != "counters")


def test_offloading_that_moves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.offload does nothing on device cpu. Set it to false"):
        make_backend(optimizer=OptimizerConfig(1e-2, offload=True))
    backend = make_backend()
    with pytest.raises(ConfigError, match="optimizer.offload does nothing on device cpu"):
        backend.add_module("critic", nn.Linear(2, 2), OptimizerConfig(1e-2, offload=True))
    config = OptimizerConfig(1e-2, offload=True)
    with pytest.raises(ConfigError, match=r"does nothing with fsdp.cpu_offload. Set one of them to false"):
        hosted_states.check_offload(config, torch.device("cuda"), keeps_host=FSDPConfig(cpu_offload=True).cpu_offload)
