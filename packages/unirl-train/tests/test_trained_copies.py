"""A named copy that trains: its own optimizer and clipping under the schedule, and a policy that never notices."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_fakes import TinyBundle, lora_config, make_backend, rows, run_backward, snapshot, train_step

from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LrSchedulerConfig
from unirl.types.errors import ConfigError, ContractError, TrainingError
from unirl.types.protocols.training import CopyTrainer
from unirl.types.training import OptimizerConfig

LR = 3e-3
MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "lora": lambda: {"lora": lora_config()},
    "bf16": lambda: {"fsdp": FSDPConfig(param_dtype="bf16")},
}


def made(max_grad_norm: float = math.inf, **options: Any) -> tuple[FSDPBackend, TinyBundle]:
    bundle = TinyBundle()
    torch.manual_seed(0)
    backend = make_backend(bundle, **options)
    backend.train_copy("fake", OptimizerConfig(learning_rate=LR), max_grad_norm=max_grad_norm)
    return backend, bundle


def loss_sum(model: nn.Module, number: int, part: slice = slice(None)) -> Tensor:
    x, y = rows(number)
    return (model(x[part]) - y[part]).square().mean(dim=1).sum()


def copy_step(backend: FSDPBackend, bundle: TinyBundle, number: int, *, factor: float = 1.0) -> Any:
    halves = [slice(0, 5), slice(5, None)]
    losses = [lambda half=half: factor * loss_sum(bundle.model, number, half) for half in halves]
    return backend.copy_step("fake", losses, 8)


@pytest.mark.parametrize("mode", list(MODES))
def test_the_policy_takes_the_steps_that_it_takes_without_a_copy(mode: str):
    backend, bundle = made(**MODES[mode]())
    alone_bundle = TinyBundle()
    torch.manual_seed(0)
    alone = make_backend(alone_bundle, **MODES[mode]())
    for number in range(3):
        copy_step(backend, bundle, number + 5)
        train_step(backend, bundle.model, number)
        train_step(alone, alone_bundle.model, number)
    state, expected = snapshot(backend), snapshot(alone)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert {name.split("/")[0] for name in state.keys() - expected.keys()} == {"policies", "copy_optimizer"}
    moved = backend.policies.values("fake")
    assert all(not torch.equal(moved[name], value) for name, value in backend.parameters.items())
    backend.close()
    alone.close()


def test_the_copy_takes_the_steps_of_a_clipped_adamw_on_the_mean_under_the_schedule():
    schedule = LrSchedulerConfig("linear", warmup_steps=2, total_steps=4)
    backend, bundle = made(max_grad_norm=0.05, scheduler=schedule)
    reference = TinyBundle().model
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0)
    for number, factor in enumerate((0.5, 0.5, 1.0, 1.0)):  # two steps of the copy for each of the policy
        stats = copy_step(backend, bundle, number)
        optimizer.zero_grad()
        (loss_sum(reference, number) / 8).backward()
        norm = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        optimizer.param_groups[0]["lr"] = factor * LR
        optimizer.step()
        assert stats.grad_norm == pytest.approx(norm, rel=1e-5) and norm > 0.05 and stats.lr == factor * LR
        if number % 2:
            train_step(backend, bundle.model, number)
    values = backend.policies.values("fake")
    for name, parameter in reference.named_parameters():
        # Another formula for the same clipping factor, divided by root second moments.
        torch.testing.assert_close(values[f"transformer.{name}"], parameter.detach(), rtol=1e-5, atol=2e-6)


def test_a_gradient_that_is_not_finite_changes_nothing_and_too_many_end_the_run():
    backend, bundle = made(max_skipped_steps=2)
    copy_step(backend, bundle, 0)
    before = snapshot(backend)
    assert copy_step(backend, bundle, 1, factor=math.inf).is_skipped
    after = snapshot(backend)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert not copy_step(backend, bundle, 1).is_skipped
    assert copy_step(backend, bundle, 1, factor=math.inf).is_skipped
    with pytest.raises(TrainingError, match="2 steps in a row of a copy that trains had a non-finite gradient norm"):
        copy_step(backend, bundle, 1, factor=math.inf)


def test_gradients_do_not_reach_the_policy():
    backend, bundle = made()
    run_backward(backend, bundle.model, 0)
    copy_step(backend, bundle, 1)
    assert all(parameter.grad is None for parameter in backend.parameters.values())


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_offloading_and_onloading_keep_the_copy_training(device: str):
    backend, bundle = made(device=device)
    others, other_bundle = made(device=device)
    for each, model in ((backend, bundle), (others, other_bundle)):
        each.copy_step("fake", [lambda model=model: on(device, model.model, 0)], 8)
    backend.offload()
    assert {tensor.device.type for tensor in backend.state_dict().values()} == {"cpu"}
    backend.onload()
    for each, model in ((backend, bundle), (others, other_bundle)):
        each.copy_step("fake", [lambda model=model: on(device, model.model, 1)], 8)
    found, expected = snapshot(backend), snapshot(others)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def on(device: str, model: nn.Module, number: int) -> Tensor:
    x, y = rows(number)
    return (model(x.to(device)) - y.to(device)).square().mean(dim=1).sum()


def test_names_and_clips_that_cannot_be_are_refused():
    backend, _ = made()
    store: CopyTrainer = backend
    with pytest.raises(ContractError, match="there is a copy 'fake' already"):
        store.train_copy("fake", OptimizerConfig(learning_rate=LR))
    with pytest.raises(ContractError, match="'a/b' is reserved or not a plain name"):
        store.train_copy("a/b", OptimizerConfig(learning_rate=LR))
    with pytest.raises(ConfigError, match=r"max_grad_norm = 0.0 of a copy must be positive"):
        store.train_copy("other", OptimizerConfig(learning_rate=LR), max_grad_norm=0.0)
