"""Schedules by hand, the form of AdamW, the gradient norm, the options."""

import math

import pytest
import torch
from torch import nn

from unirl.distributed.dispatch import shard_ranks
from unirl.train.configs import (
    Axes,
    EMAConfig,
    FSDPConfig,
    LoraConfig,
    LrSchedulerConfig,
    OptimizerConfig,
    TrainTopology,
)
from unirl.train.ema import EMA, average_into, ema_decay, float_copies
from unirl.train.optim import adamw_implementation, clip_gradients, global_grad_norm, learning_rate_at, make_adamw
from unirl.types.errors import ConfigError


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, [1.0] * 7),
        (LrSchedulerConfig("constant", warmup_steps=2), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (LrSchedulerConfig("linear", warmup_steps=2, total_steps=6), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        (
            LrSchedulerConfig("cosine", warmup_steps=2, total_steps=6),
            [0.5, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0],
        ),
        (LrSchedulerConfig("linear", total_steps=2), [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_schedules_with_warmup_have_the_values_worked_out_by_hand(
    schedule: LrSchedulerConfig | None, expected: list[float]
):
    rates = [learning_rate_at(step, 3.0, schedule) / 3.0 for step in range(7)]
    assert rates == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LrSchedulerConfig("cosin", total_steps=3), "must be one of constant, linear, cosine"),  # ty: ignore
        (lambda: LrSchedulerConfig("cosine"), "needs scheduler.total_steps"),
        (lambda: LrSchedulerConfig("linear", warmup_steps=5, total_steps=5), "more than warmup_steps = 5"),
        (lambda: LrSchedulerConfig("constant", total_steps=5), "means nothing"),
        (lambda: OptimizerConfig(-1.0), "learning_rate = -1.0"),
        (lambda: OptimizerConfig(1.0, betas=(0.9, 1.0)), "betas"),
        (lambda: OptimizerConfig(1.0, implementation="fast"), "must be one of auto"),  # ty: ignore
        (lambda: FSDPConfig(param_dtype="float16"), "fp32, bf16, fp16"),
        (lambda: FSDPConfig(param_dtype="fp32", master_dtype="bf16"), "less precise"),
        (lambda: LoraConfig(rank=0, alpha=1.0), "rank = 0"),
        (lambda: LoraConfig(rank=1, alpha=1.0, dropout=0.1), "ratio"),
        (lambda: LoraConfig(rank=1, alpha=1.0, target_modules="to_q"), "must be a list"),
        (lambda: EMAConfig(decay=1.0), "decay = 1.0"),
        (lambda: EMAConfig(every=0), "every = 0"),
        (lambda: TrainTopology(dp_replicate=3).resolved(8), "dp_replicate = 3 does not divide 8"),
        (lambda: TrainTopology(sp=3).resolved(8), "topology.sp = 3 does not divide 8 devices. Change sp, or the num"),
        (lambda: TrainTopology(2, sp=8).resolved(8), r"dp_replicate \* sp = 2 \* 8 = 16 does not divide 8 devices"),
        (lambda: TrainTopology(1, 8, 2).resolved(8), r"dp_shard \* sp = 1 \* 8 \* 2 = 16, but .* 8 .*dp_shard: 4"),
        (lambda: TrainTopology(sp=0), "topology.sp = 0 must be at least 1"),
        (
            lambda: TrainTopology(ep=3).resolved(8),
            "topology.ep = 3 does not divide the 8 devices. Change ep, or the",
        ),
        (lambda: TrainTopology(2, ep=8).resolved(8), "topology.ep = 8 does not divide the 4 devices of each copy."),
        (lambda: TrainTopology(2, 8).resolved(8), r"2 \* 8 = 16, but there are 8 devices. Set dp_shard: 4"),
    ],
)
def test_impossible_options_are_refused_with_their_values(make, message: str):
    with pytest.raises(ConfigError, match=message):
        make()


def test_topologies_resolve_to_the_number_of_devices():
    assert TrainTopology().resolved(8) == Axes(1, 8, sp=1)
    assert TrainTopology(dp_replicate=2).resolved(8) == Axes(2, 4, sp=1)
    assert TrainTopology(2, 4).resolved(8) == Axes(2, 4, sp=1)
    assert TrainTopology(sp=4).resolved(8) == Axes(1, 2, sp=4)
    assert TrainTopology(sp=4, ring=2).resolved(8) == Axes(1, 2, sp=4, ring=2)
    assert TrainTopology(2, 2, 2).resolved(8) == Axes(2, 2, sp=2)
    assert TrainTopology(2, ep=4).resolved(8) == Axes(2, 4, sp=1, ep=4)
    assert TrainTopology(2, tp=2).resolved(8) == Axes(2, 2, sp=1, tp=2)


def test_neighbouring_ranks_share_samples():
    places = [TrainTopology(sp=2).place(rank, 4) for rank in range(4)]
    assert shard_ranks(places) == [[0, 1], [2, 3]]
    assert [(place.sp_rank, place.sp_size) for place in places] == [(0, 2), (1, 2)] * 2
    places = [TrainTopology(2, ep=2).place(rank, 8) for rank in range(8)]
    assert [(place.dp_rank, place.ep_rank, place.ep_size) for place in places] == [(r, r % 2, 2) for r in range(8)]


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_every_form_of_adamw_takes_the_same_steps_as_torch(implementation):
    # Fresh state of torch's own AdamW against the state that make_adamw prepares; float64 has nothing to round.
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(5, 3, dtype=torch.float64)), nn.Parameter(torch.randn(4, dtype=torch.float64))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = make_adamw(ours, OptimizerConfig(0.1, weight_decay=0.01, implementation=implementation))
    reference = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.01, foreach=False)
    for step in range(4):
        for a, b in zip(ours, theirs, strict=True):
            gradient = torch.randn(a.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            a.grad, b.grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_auto_fuses_on_the_cpu_and_refuses_to_fuse_where_it_cannot():
    on_cpu = [nn.Parameter(torch.zeros(2))]
    on_meta = [nn.Parameter(torch.zeros(2, device="meta"))]
    assert adamw_implementation(on_cpu, "auto") == "fused"
    assert adamw_implementation(on_meta, "auto") == "foreach"
    assert adamw_implementation(on_cpu, "loop") == "loop"
    with pytest.raises(ConfigError, match="fused"):
        adamw_implementation(on_meta, "fused")


def test_the_norm_is_that_of_all_gradients_together_and_clipping_reaches_the_limit():
    gradients = [torch.full((4,), 3.0), torch.full((4,), 4.0)]
    norm = float(global_grad_norm(gradients))
    assert norm == pytest.approx(10.0)
    clip_gradients(gradients, norm, 20.0)
    assert gradients[0].tolist() == [3.0] * 4
    clip_gradients(gradients, norm, 1.0)
    assert float(global_grad_norm(gradients)) == pytest.approx(1.0)


def test_a_norm_whose_square_overflows_float32_is_finite():
    assert float(global_grad_norm([torch.full((1,), 1e25), torch.full((1,), 1e25)])) == pytest.approx(2**0.5 * 1e25)


def test_the_moving_average_follows_its_closed_form():
    parameter = nn.Parameter(torch.zeros(3))
    ema = EMA({"w": parameter}, EMAConfig(decay=0.5, warmup=False, every=2))
    for step in range(1, 7):
        with torch.no_grad():
            parameter.fill_(float(step))
        ema.after_step(step)
    # Averages at 2, 4 and 6: ((0 + 2) / 2 + 4) / 2 and so on, exact in binary.
    assert ema.copies["w"].tolist() == [0.125 * 2 + 0.25 * 4 + 0.5 * 6] * 3
    assert ema.num_averages == 3


@pytest.mark.parametrize("resumed_at", [None, 20])
def test_the_warm_up_counts_optimizer_steps_as_in_flow_grpo(resumed_at):
    # Flow-GRPO's rule, written down from its published code: step k averages where (k + 1) % 8 == 0.
    copy = 0.0
    for k in range(64):
        if (k + 1) % 8 == 0:
            decay = min((1 + k) / (10 + k), 0.9)
            copy = decay * copy + (1 - decay) * (k + 1)
    assert 64 - copy == pytest.approx(30.1, abs=0.05)  # steps that the copy of weights equal to their step lags

    config = EMAConfig(decay=0.9, every=8)
    parameters = {"w": nn.Parameter(torch.zeros(1))}
    ema = EMA(parameters, config)
    for step in range(1, 65):
        if step == resumed_at:
            resumed = EMA(parameters, config)
            resumed.copies, resumed.num_averages = ema.copies, ema.num_averages
            ema = resumed
        with torch.no_grad():
            parameters["w"].fill_(float(step))
        ema.after_step(step)
    assert float(ema.copies["w"]) == pytest.approx(copy, rel=1e-6)


def test_the_warmed_up_decay_rises_to_its_limit():
    config = EMAConfig(decay=0.9)
    assert [ema_decay(t, config) for t in (0, 8, 1000)] == [1 / 10, 9 / 18, 0.9]


def test_parameters_that_stand_still_are_the_fixed_point_of_their_average():
    torch.manual_seed(0)
    parameters = {"w": nn.Parameter(torch.randn(1000))}
    copies = float_copies(parameters)
    for decay in (0.1, 0.3, 0.7, 0.9999):
        average_into(copies, parameters, decay)
    assert torch.equal(copies["w"], parameters["w"].detach())


def test_a_decay_of_zero_copies_exactly_and_of_one_changes_nothing():
    torch.manual_seed(0)
    parameters = {"w": nn.Parameter(torch.randn(1000))}
    copies = {"w": torch.randn(1000)}
    before = copies["w"].clone()
    average_into(copies, parameters, 1.0)
    assert torch.equal(copies["w"], before)
    average_into(copies, parameters, 0.0)
    assert torch.equal(copies["w"], parameters["w"].detach())


def test_averages_of_half_precision_parameters_are_kept_in_float32():
    parameters = {"w": nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}
    copies = float_copies(parameters)
    with torch.no_grad():
        parameters["w"].fill_(2.0)
    average_into(copies, parameters, 0.999)
    assert copies["w"].dtype == torch.float32
    assert copies["w"].tolist() == pytest.approx([1.001] * 4, abs=1e-7)
