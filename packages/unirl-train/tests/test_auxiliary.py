"""A module that trains together with the policy: it has its own optimizer, is skipped, saved and moved with the policy,
and is never part of it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_fakes import TinyBundle, make_backend, rows, run_backward, snapshot

from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import EMAConfig, FSDPConfig, LrSchedulerConfig, OptimizerConfig
from unirl.train.export import Exporter
from unirl.types.errors import CheckpointError, ConfigError, ContractError
from unirl.types.protocols.training import ModuleStore
from unirl.types.training import StepStats

LR = 3e-3
MODES: dict[str, dict[str, Any]] = {"plain": {}, "bf16": {"fsdp": FSDPConfig(param_dtype="bf16")}}


def small_module(seed: int = 2) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(8, 1)


def made(seed: int = 2, max_grad_norm: float = math.inf, **options: Any) -> tuple[FSDPBackend, TinyBundle, nn.Linear]:
    bundle, module = TinyBundle(), small_module(seed)
    backend = make_backend(bundle, **options)
    backend.add_module("critic", module, OptimizerConfig(learning_rate=LR), max_grad_norm=max_grad_norm)
    return backend, bundle, module


def module_loss(module: nn.Module, step: int) -> torch.Tensor:
    x, y = rows(step)
    return (module(x).squeeze(-1) - y[:, 0]).square().mean()


def step(backend: FSDPBackend, bundle: TinyBundle, module: nn.Module, number: int) -> StepStats:
    run_backward(backend, bundle.model, number)
    module_loss(module, number).backward()
    return backend.optimizer_step(1.0)


@pytest.mark.parametrize("mode", list(MODES))
def test_the_policy_takes_the_steps_that_it_takes_alone(mode: str):
    backend, bundle, module = made(**MODES[mode], ema=EMAConfig())
    alone_bundle = TinyBundle()
    alone = make_backend(alone_bundle, **MODES[mode], ema=EMAConfig())
    for number in range(3):
        stats = step(backend, bundle, module, number)
        run_backward(alone, alone_bundle.model, number)
        assert alone.optimizer_step(1.0).grad_norm == stats.grad_norm
    state, expected = snapshot(backend), snapshot(alone)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert {name.split("/")[0] for name in state.keys() - expected.keys()} == {"auxiliary"}
    assert backend.parameters.keys() == alone.parameters.keys()
    assert backend.policies.values("default").keys() == alone.policies.values("default").keys()
    backend.close()
    alone.close()


def test_the_module_takes_the_steps_of_a_clipped_adamw_of_its_own_under_the_schedule():
    schedule = LrSchedulerConfig("linear", warmup_steps=2, total_steps=4)
    backend, bundle, module = made(max_grad_norm=0.05, scheduler=schedule)
    reference = small_module()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0)
    for number, factor in enumerate((0.5, 1.0, 1.0, 0.5)):
        stats = step(backend, bundle, module, number)
        optimizer.zero_grad()
        module_loss(reference, number).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        optimizer.param_groups[0]["lr"] = factor * LR
        optimizer.step()
        assert stats.module_grad_norms == {"critic": pytest.approx(float(norm), rel=1e-5)}
        assert float(norm) > 0.05
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        # Another formula for the same clipping factor, divided by root second moments.
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("which", ["policy", "module"])
def test_a_gradient_that_is_not_finite_skips_both(which: str):
    backend, bundle, module = made()
    step(backend, bundle, module, 0)
    before = snapshot(backend)
    run_backward(backend, bundle.model, 1)
    module_loss(module, 1).backward()
    parameters = backend.parameters.values() if which == "policy" else module.parameters()
    gradient = next(iter(parameters)).grad
    assert gradient is not None
    gradient.fill_(math.inf)
    stats = backend.optimizer_step(1.0)
    assert stats.is_skipped
    assert math.isfinite(stats.grad_norm) == (which == "module")
    after = snapshot(backend)
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["counters"]
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_module_without_gradients_stays_and_a_frozen_parameter_is_left_alone():
    backend, bundle, module = made()
    run_backward(backend, bundle.model, 0)
    assert backend.optimizer_step(1.0).module_grad_norms == {"critic": 0.0}
    assert torch.equal(module.weight, small_module().weight)
    frozen = small_module()
    frozen.bias.requires_grad_(False)
    backend.add_module("other", frozen, OptimizerConfig(learning_rate=LR))
    assert "auxiliary/other/optimizer/bias/exp_avg" not in backend.state_dict()
    assert "auxiliary/other/module/bias" in backend.state_dict()


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_two_steps_a_resume_and_two_steps_equal_four_bit_for_bit(mode: str, is_async: bool, tmp_path: Path):
    backend, bundle, module = made(**MODES[mode])
    for number in range(2):
        step(backend, bundle, module, number)
    checkpointer = Checkpointer(backend, str(tmp_path), is_async=is_async)
    checkpointer.save(2, {})
    for number in range(2, 4):
        step(backend, bundle, module, number)
    checkpointer.wait()
    expected = snapshot(backend)
    backend.close()
    resumed, bundle, module = made(seed=9, **MODES[mode])
    Checkpointer(resumed, str(tmp_path)).load()
    for number in range(2, 4):
        step(resumed, bundle, module, number)
    found = snapshot(resumed)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    resumed.close()


def test_a_checkpoint_of_another_module_is_refused_by_name(tmp_path: Path):
    backend, _, _ = made()
    Checkpointer(backend, str(tmp_path)).save(1, {})
    with pytest.raises(CheckpointError, match=r"auxiliary/critic.weight: saved \[1, 8\] torch.float32, here absent"):
        Checkpointer(make_backend(), str(tmp_path)).load()
    other = make_backend()
    other.add_module("critic", nn.Linear(8, 3), OptimizerConfig(learning_rate=LR))
    with pytest.raises(CheckpointError, match=r"auxiliary/critic.weight: saved \[1, 8\].*here \[3, 8\]"):
        Checkpointer(other, str(tmp_path)).load()
    with pytest.raises(CheckpointError, match="tensors missing"):
        backend.load_state_dict(make_backend().state_dict())


def test_offloading_and_onloading_keep_every_value():
    backend, bundle, module = made()
    step(backend, bundle, module, 0)
    module_loss(module, 1).backward()
    before, gradient = snapshot(backend), module.weight.grad
    assert gradient is not None
    gradient = gradient.clone()
    backend.offload()
    backend.onload()
    after = snapshot(backend)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert module.weight.grad is not None and torch.equal(module.weight.grad, gradient)
    run_backward(backend, bundle.model, 1)
    assert not backend.optimizer_step(1.0).is_skipped


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloading_leaves_the_device_and_comes_back():
    backend, bundle, module = made(device="cuda")
    assert module.weight.device.type == "cuda"
    backend.offload()
    assert {tensor.device.type for tensor in backend.state_dict().values()} == {"cpu"}
    backend.onload()
    assert module.weight.device.type == "cuda"
    assert backend.state_dict()["auxiliary/critic/optimizer/weight/exp_avg"].device.type == "cuda"


def test_the_module_is_no_part_of_policies_and_exports(tmp_path: Path):
    backend, bundle, module = made(ema=EMAConfig())
    backend.keep_policy("old")
    step(backend, bundle, module, 0)
    weight = module.weight.detach().clone()
    with backend.using_policy("old"):
        assert torch.equal(module.weight, weight)
    assert not [name for name in backend.state_dict() if name.startswith(("policies/", "ema/")) and "critic" in name]
    Exporter(backend, bundle).export_merged(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["transformer.safetensors"]


def test_names_and_clips_that_cannot_be_are_refused():
    backend, _, _ = made()
    store: ModuleStore = backend
    for name in ("critic", "a/b", ""):
        with pytest.raises(ContractError, match="is taken or not a plain name"):
            store.add_module(name, small_module(), OptimizerConfig(learning_rate=LR))
    with pytest.raises(ConfigError, match=r"max_grad_norm = 0.0 of a module must be positive"):
        store.add_module("v", small_module(), OptimizerConfig(learning_rate=LR), max_grad_norm=0.0)
