"""AdamW with 8-bit and bfloat16 moments: against references, and the same on any number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from ranks import results_of_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from unirl.train import small_states
from unirl.train.block_codes import dequantised, quantised
from unirl.train.optim import make_adamw
from unirl.train.small_states import (
    block_of,
    dynamic_values,
    noise,
    rounded_at_random,
)
from unirl.types.errors import ConfigError
from unirl.types.training import OptimizerConfig, OptimizerStates

SHAPES = ((48, 256), (30, 160), (50, 96), (7,), (16, 8, 3, 3))
"""Shapes of parameters with blocks of 256, of 160, of 96, with too few elements, and with rows that do not divide."""


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def optimizer(of: list[nn.Parameter], states: OptimizerStates) -> torch.optim.Optimizer:
    return make_adamw(of, OptimizerConfig(1e-2, weight_decay=0.1, states=states))


def stepped(of: list[nn.Parameter], states: OptimizerStates, num: int = 4) -> torch.optim.Optimizer:
    made = optimizer(of, states)
    for step in range(num):
        for parameter, gradient in zip(of, gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        made.step()
    return made


# 8-bit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_name_the_nearest_of_256_values(is_signed: bool) -> None:
    table = dynamic_values(is_signed=is_signed)
    assert len(table) == 256 and bool((table[1:] > table[:-1]).all())
    assert (
        float(table[-1]) == 1.0
        and 0.0 in table.tolist()
        and float(table[0]) == pytest.approx(-0.99297 * is_signed, abs=1e-5)
    )
    values = torch.randn(8 * 64, generator=torch.Generator().manual_seed(1))
    values = values if is_signed else values.square()
    codes, scale = quantised(values, table, 64)
    assert torch.equal(scale, values.view(8, 64).abs().amax(1))
    distance = (values.view(8, 64, 1) / scale[:, None, None] - table).abs()
    chosen = distance.gather(2, codes.view(8, 64, 1).long())[..., 0]
    assert torch.equal(chosen, distance.amin(2))
    found = dequantised(codes, scale, table, 64)
    torch.testing.assert_close(found, values, rtol=0, atol=0.02 * float(scale.max()))


def test_the_values_are_those_of_torchao() -> None:
    reference = pytest.importorskip("torchao.optim.quant_utils")
    for is_signed in (True, False):
        theirs = torch.tensor(reference.create_dynamic_map(is_signed))
        torch.testing.assert_close(dynamic_values(is_signed=is_signed), theirs, rtol=1e-6, atol=0)


def test_steps_are_those_of_torchao() -> None:
    """Rows that divide into its blocks of 256; without its rounding of parameters, which draws other numbers."""
    reference = pytest.importorskip("torchao.optim")
    ours = [nn.Parameter(torch.randn(48, 256, generator=torch.Generator().manual_seed(0)))]
    theirs = [nn.Parameter(each.detach().clone()) for each in ours]
    one = make_adamw(ours, OptimizerConfig(1e-2, weight_decay=0.1, states="8bit"))
    two = reference.AdamW8bit(theirs, lr=1e-2, weight_decay=0.1)
    with torch.compiler.set_stance("force_eager"):
        for step in range(4):
            gradient = gradients(step)[0]
            ours[0].grad, theirs[0].grad = gradient, gradient.clone()
            one.step()
            two.step()
    # A moment between two codes may go to either.
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-4)


def test_moments_that_stay_whole_step_as_adamw_and_8_bits_stay_close() -> None:
    ours, theirs = parameters(), parameters()
    state = stepped(ours, "8bit").state
    stepped(theirs, "full")
    for mine, its in zip(ours, theirs, strict=True):
        is_whole = "exp_avg_scale" not in state[mine]
        assert is_whole == (block_of(mine) is None) == (mine.shape in SHAPES[3:])
        # Four steps move by about 0.04, of which codes keep two digits.
        torch.testing.assert_close(mine, its, rtol=1e-6 if is_whole else 0, atol=1e-7 if is_whole else 6e-3)


def test_eight_bits_take_a_quarter_of_float32() -> None:
    (wide, *_) = mine = parameters()
    state = optimizer(mine, "8bit").state[wide]
    num_bytes = sum(each.nbytes for name, each in state.items() if name != "step")
    assert num_bytes == 2 * (wide.numel() + 4 * wide.numel() // 256)


# Rounding at random -----------------------------------------------------------------------------------------------


def test_rounding_takes_one_of_two_neighbours_and_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(64, generator=generator)
    every = torch.arange(65536, dtype=torch.int32)
    for value in values:
        found = rounded_at_random(value.expand(65536).contiguous(), every).double()
        assert len(found.unique()) <= 2
        assert float((found - value).abs().max()) <= abs(float(value)) / 128
        assert float(found.mean()) == pytest.approx(float(value), rel=1e-7)
    special = torch.tensor([0.0, 1.0, -2.0, float("inf"), float("nan")])
    kept = rounded_at_random(special, torch.full((5,), 65535, dtype=torch.int32))
    assert torch.equal(kept.float(), special) or kept[:4].float().tolist() == special[:4].tolist()
    assert bool(kept[4].isnan())


def test_noise_is_even_and_belongs_to_a_place() -> None:
    bits = noise(0, 1 << 18, 5, torch.device("cpu"))
    counts = torch.bincount((bits >> 8).long(), minlength=256)
    # A multinomial's counts of 1024 vary by 32; five times that in 256 draws does not occur.
    assert int(counts.min()) > 1024 - 160 and int(counts.max()) < 1024 + 160
    assert torch.equal(noise(1000, 50, 5, bits.device), bits[1000:1050])
    assert float((noise(0, 1 << 18, 6, bits.device) == bits).float().mean()) < 1e-3


def test_updates_below_the_step_of_bfloat16_add_up() -> None:
    """0.001 a step on a weight of one, whose bfloat16 neighbours are 0.004 below and 0.008 above."""
    moved = {}
    for states in ("full", "bf16", "8bit"):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        made = make_adamw([weight], OptimizerConfig(1e-3, states=states))
        for _ in range(32):
            weight.grad = torch.ones_like(weight)
            made.step()
        moved[states] = 1 - float(weight.float().mean())
    assert moved["full"] == 0.0
    # The mean over 4096 weights that each take about eight steps of 1/256.
    assert moved["bf16"] == pytest.approx(0.032, rel=0.05)
    assert moved["8bit"] == pytest.approx(0.032, rel=0.05)


def test_second_moments_in_bfloat16_follow_small_gradients() -> None:
    """A moment of one under gradients of 0.9 falls by 0.0002 a step, a twentieth of what bfloat16 can show."""
    weight = nn.Parameter(torch.zeros(64, 64))
    made = make_adamw([weight], OptimizerConfig(1e-3, states="bf16"))
    made.state[weight]["exp_avg_sq"].fill_(1.0)
    for _ in range(100):
        weight.grad = torch.full_like(weight, 0.9)
        made.step()
    expected = 0.81 + 0.19 * 0.999**100
    assert float(made.state[weight]["exp_avg_sq"].float().mean()) == pytest.approx(expected, abs=1e-3)


# Parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["8bit", "bf16"])
def test_a_step_in_parts_is_that_of_the_whole(states: Literal["8bit", "bf16"], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = parameters(torch.bfloat16), parameters(torch.bfloat16)
    stepped(whole, states)
    monkeypatch.setattr(small_states, "AT_ONCE", 1000)
    stepped(parts, states)
    assert all(torch.equal(one, two) for one, two in zip(whole, parts, strict=True))


def test_channels_may_lie_last() -> None:
    first, last = ([nn.Parameter(torch.ones(8, 64, 3, 3, dtype=torch.float32))] for _ in range(2))
    last[0].data = last[0].data.to(memory_format=torch.channels_last)
    gradient = torch.randn(8, 64, 3, 3, generator=torch.Generator().manual_seed(3))
    for one in (first, last):
        made = optimizer(one, "8bit")
        one[0].grad = gradient.clone()
        made.step()
    assert torch.equal(first[0], last[0])


def sharded_state(states: OptimizerStates) -> list[Tensor]:
    """Parameters and moments after four steps of two ranks, whole."""
    mesh = init_device_mesh("cpu", (2,))
    placements = [Shard(0)] * 3 + [Replicate(), Shard(0)]
    mine = [
        nn.Parameter(distribute_tensor(each.detach(), mesh, [placement]))
        for each, placement in zip(parameters(torch.bfloat16), placements, strict=True)
    ]
    made = optimizer(mine, states)
    for step in range(4):
        for parameter, gradient, placement in zip(mine, gradients(step), placements, strict=True):
            parameter.grad = distribute_tensor(gradient.to(torch.bfloat16), mesh, [placement])
        made.step()
    found = [each for parameter in mine for each in (parameter.detach(), *made.state[parameter].values())]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("states", ["8bit", "bf16"])
def test_two_ranks_take_the_steps_of_one_bit_for_bit(states: OptimizerStates, tmp_path: Path) -> None:
    mine = parameters(torch.bfloat16)
    made = stepped(mine, states)
    expected: list[Any] = [each for one in mine for each in (one.detach(), *made.state[one].values())]
    for rank in results_of_ranks(partial(sharded_state, states), tmp_path):
        assert all(torch.equal(one, two) for one, two in zip(rank, expected, strict=True))


def test_forms_of_adamw_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"implementation = 'fused'.*instead of 8bit"):
        OptimizerConfig(1e-3, implementation="fused", states="8bit")
