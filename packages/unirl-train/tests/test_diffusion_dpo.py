"""Diffusion-DPO: its value and gradient at the reference and away from it, pairs, ties and shared noise."""

import math
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import AffineField, Setup, displace, rollout, sampling, setup
from torch import Tensor

from unirl.algorithms.base import MicroBatch
from unirl.algorithms.diffusion_dpo import DiffusionDPO
from unirl.algorithms.forward_process import unit_order
from unirl.algorithms.losses import preference_loss
from unirl.train.configs import LoraConfig
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment

PAIRS = sampling(eta=0.0, samples_per_prompt=2)
START = (0.7, 0.1)
"""Scale and shift of the fresh affine field."""
ADVANTAGES = torch.tensor([1.0, -1.0, -0.5, 0.5, 2.0, 1.0, 0.0, 0.0])
"""First wins, second wins, first wins though both are good, tie."""
SIGNS = torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=torch.float64)


def made_with(**options: Any) -> tuple[Setup, RolloutResp]:
    options = {"model": AffineField(), "keep_reference": True, "num_timesteps": 2, **options}
    made = setup(DiffusionDPO, **options)
    return made, rollout(made.pipeline, PAIRS, num_prompts=4)


def micro_of(track: RolloutTrack, advantages: Tensor) -> MicroBatch:
    return MicroBatch(track=track.replace(advantages=advantages), anchor={}, update=0, progress=0.0)


def noised(made: Setup, resp: RolloutResp, num_levels: int = 2) -> dict[str, Tensor]:
    """x_t and target [P, K, 2, ...] of the first training in float64, rebuilt from what the model was asked."""
    track = resp.tracks["image"]
    assert isinstance(track.segment, LatentSegment)
    made.pipeline.seen_x.clear()
    with torch.no_grad():
        list(made.algorithm.losses(micro_of(track, ADVANTAGES)))
    # The model is asked twice per chunk, first under the reference.
    shape = (4, num_levels, 2, *made.pipeline.shape)
    x_t = torch.cat(made.pipeline.seen_x[1::2]).double().view(shape)
    groups = [f"r0:{group}" for group in track.group_ids[::2]]
    sigma = made.algorithm.levels(groups, track.segment).double().view(4, num_levels, 1, 1, 1, 1)
    x0 = track.segment.clean_latents.double().view(4, 1, 2, *made.pipeline.shape)
    noise = (x_t - (1 - sigma) * x0) / sigma
    return {"x_t": x_t, "noise": noise, "target": noise - x0, "sigma": sigma}


def distances(rows: dict[str, Tensor], theta: Tensor) -> Tensor:
    """mean ||v - u||^2 [P, K, 2] of the affine field."""
    return (theta[0] * rows["x_t"] + theta[1] - rows["target"]).square().flatten(3).mean(3)


def expected_loss(rows: dict[str, Tensor], theta: Tensor, beta: float) -> Tensor:
    d = distances(rows, theta) - distances(rows, torch.tensor(START, dtype=torch.float64))
    margin = SIGNS[:, None] * (d[..., 0] - d[..., 1])
    losses = -torch.log(torch.sigmoid(-beta / 2 * margin))
    return torch.where(SIGNS[:, None] != 0, losses, 0.0).mean()


def gradient(made: Setup) -> Tensor:
    found = made.backend.gradients[0]
    return torch.cat([found["transformer.scale"], found["transformer.shift"]]).double()


def test_at_the_reference_the_loss_is_ln_2_and_its_gradient_a_quarter_of_beta():
    margin = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    loss = preference_loss(margin, beta=8.0)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([math.log(2)] * 3)
    assert margin.grad is not None and margin.grad.tolist() == [2.0] * 3

    made, resp = made_with(beta=8.0)
    rows = noised(made, resp)
    metrics = made.stack.train(with_advantages(resp, ADVANTAGES), progress=0.0).metrics
    # Three pairs of four; the tie counts in the mean.
    assert metrics["policy/loss"] == pytest.approx(0.75 * math.log(2), rel=1e-6)
    assert metrics["dpo/tie_fraction"] == 0.25 and metrics["dpo/margin"] == 0.0
    assert metrics["dpo/policy_distance"] == 0.0
    theta = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    d = distances(rows, theta)
    (SIGNS[:, None] * (d[..., 0] - d[..., 1]) * 8.0 / 4).mean().backward()
    torch.testing.assert_close(gradient(made), theta.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows_per_forward", [None, 2, 6])
def test_away_from_the_reference_value_and_gradient_equal_float64_finite_differences(rows_per_forward: int | None):
    beta = 3.0
    made, resp = made_with(beta=beta, rows_per_forward=rows_per_forward)
    rows = noised(made, resp)
    displace(made.backend, 0.3)
    theta = torch.cat([made.parameters["transformer.scale"], made.parameters["transformer.shift"]]).double()
    metrics = made.stack.train(with_advantages(resp, ADVANTAGES), progress=0.0).metrics
    assert metrics["policy/loss"] == pytest.approx(float(expected_loss(rows, theta, beta)), rel=1e-5)
    steps = 1e-5 * torch.eye(2, dtype=torch.float64)
    numeric = [
        (expected_loss(rows, theta + step, beta) - expected_loss(rows, theta - step, beta)) / 2e-5 for step in steps
    ]
    # The model and the loss compute in float32.
    torch.testing.assert_close(gradient(made), torch.stack(numeric), rtol=1e-4, atol=1e-5)


def test_a_pair_shares_noise_and_levels_and_pairs_do_not():
    made, resp = made_with(num_timesteps=2)
    rows = noised(made, resp)
    torch.testing.assert_close(rows["noise"][:, :, 0], rows["noise"][:, :, 1], rtol=0, atol=1e-5)
    first = rows["noise"][:, :, 0].flatten(0, 1).flatten(1)
    apart = torch.cdist(first, first) + 10 * torch.eye(8, dtype=torch.float64)
    assert float(apart.min()) > 0.1


def test_the_better_sample_becomes_likelier():
    made, resp = made_with(beta=5.0, lr=1e-2, model=None)
    seen = [made.stack.train(with_advantages(resp, ADVANTAGES), progress=0.0).metrics for _ in range(60)]
    # Fresh noise every time: what was learnt is about the samples.
    mean = {name: sum(metrics[name] for metrics in seen[40:]) / 20 for name in seen[0]}
    assert mean["dpo/accuracy"] > 0.55 and mean["dpo/margin"] > 0.1


def test_a_batch_of_ties_gives_no_gradient():
    made, resp = made_with()
    displace(made.backend, 0.1)
    metrics = made.stack.train(with_advantages(resp, torch.ones(8)), progress=0.0).metrics
    assert metrics["policy/loss"] == 0.0 and metrics["dpo/tie_fraction"] == 1.0
    assert "dpo/accuracy" not in metrics
    assert torch.equal(gradient(made), torch.zeros(2, dtype=torch.float64))


def test_updates_and_micro_batches_keep_pairs_together():
    whole, resp = made_with(micro=8, beta=3.0, model=None)
    for made in (whole, parts := made_with(micro=2, beta=3.0, model=None)[0]):
        displace(made.backend, 0.1)
        made.stack.train(with_advantages(resp, ADVANTAGES), progress=0.0)
    for name, expected in whole.backend.gradients[0].items():
        torch.testing.assert_close(parts.backend.gradients[0][name], expected, rtol=1e-5, atol=1e-6)
    updated, _ = made_with(updates=2, micro=4)
    assert len(updated.stack.train(with_advantages(resp, ADVANTAGES), progress=0.0).updates) == 2


def test_with_lora_the_base_is_the_reference():
    made, resp = made_with(model=None, lora=LoraConfig(rank=2, alpha=4.0), keep_reference=False)
    metrics = made.stack.train(with_advantages(resp, ADVANTAGES), progress=0.0).metrics
    assert metrics["policy/loss"] == pytest.approx(0.75 * math.log(2), rel=1e-6)


def test_rows_come_unit_by_unit_then_level_by_level():
    assert unit_order(4, 3, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert unit_order(3, 2, 1).tolist() == list(range(6))


def test_what_is_no_pair_is_refused():
    made, resp = made_with()
    single = rollout(made.pipeline, sampling(eta=0.0, samples_per_prompt=1), num_prompts=4)
    with pytest.raises(ContractError, match=r"2 samples that DiffusionDPO compares must come from one.*best_of: 2"):
        made.stack.train(with_advantages(single, torch.ones(4)), progress=0.0)
    with pytest.raises(ConfigError, match="3 samples per device, 2 to a unit"):
        made.stack.train(with_advantages(single.slice(0, 3), torch.ones(3)), progress=0.0)
    with pytest.raises(ContractError, match="3 samples do not divide into units of 2"):
        list(made.algorithm.losses(micro_of(resp.slice(0, 3).tracks["image"], torch.ones(3))))
    alone, _ = made_with(keep_reference=False)
    with pytest.raises(ConfigError, match="keep_reference"):
        alone.stack.train(with_advantages(resp, ADVANTAGES), progress=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0 must be above 0"),
        ({"rows_per_forward": 3}, "rows_per_forward = 3 must be a multiple of 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        setup(DiffusionDPO, **options)
