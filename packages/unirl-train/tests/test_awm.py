"""AWM: its ratio, its first gradient against float64, its penalties."""

from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import AffineField, Setup, displace, rollout, sampling, setup, some_advantages
from torch import Tensor

from unirl.algorithms.awm import AWM
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.losses import MATCHING_WEIGHTINGS, matching_logp
from unirl.train.configs import EMAConfig
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment

DETERMINISTIC = sampling(eta=0.0)
START = (0.7, 0.1)
"""Scale and shift of the fresh affine field."""


def made_with(**options: Any) -> tuple[Setup, RolloutResp]:
    options = {"model": AffineField(), **options}
    made = setup(AWM, **options)
    return made, rollout(made.pipeline, DETERMINISTIC)


def micro_of(track: RolloutTrack, advantages: Tensor) -> MicroBatch:
    return MicroBatch(track=track.replace(advantages=advantages), anchor={}, update=0, progress=0.0)


def noised(made: Setup, resp: RolloutResp) -> dict[str, Tensor]:
    """x_t, target and sigma of every row of the first training, in float64, rebuilt from what the model was asked."""
    track = resp.tracks["image"]
    assert isinstance(track.segment, LatentSegment)
    made.pipeline.seen_x.clear()
    made.algorithm.anchor(micro_of(track, torch.zeros(track.batch_size)))
    x_t = torch.cat(made.pipeline.seen_x).double()
    num_levels = x_t.shape[0] // track.batch_size
    sigma = made.algorithm.levels([f"r0:{name}" for name in track.sample_ids], track.segment).flatten().double()
    x0 = track.segment.clean_latents.double().repeat_interleave(num_levels, dim=0)
    wide = sigma.view(-1, 1, 1, 1)
    noise = (x_t - (1 - wide) * x0) / wide
    return {"x_t": x_t, "target": noise - x0, "sigma": sigma}


def by_hand(weighting: str, error: Tensor, t: Tensor, power: float) -> Tensor:
    return {
        "uniform": -error,
        "t": -t * error,
        "t2": -(t**2) * error,
        "huber": -t * (torch.sqrt(error + 1e-10) - 1e-5),
        "ghuber": -t / power * (torch.pow(error + 1e-10, power) - 1e-10**power),
    }[weighting]


@pytest.mark.parametrize("weighting", MATCHING_WEIGHTINGS)
def test_the_log_prob_is_minus_the_weighted_error(weighting: str):
    torch.manual_seed(0)
    v, target = torch.randn(4, 3, 2, 2, dtype=torch.float64), torch.randn(4, 3, 2, 2, dtype=torch.float64)
    t = torch.tensor([0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    error = ((v - target) ** 2).flatten(1).mean(1)
    found = matching_logp(v, target, t, weighting=weighting, power=0.25)
    torch.testing.assert_close(found, by_hand(weighting, error, t, 0.25), rtol=1e-12, atol=0)
    # A perfect prediction has log-prob 0 and a finite gradient under every weighting.
    same = target.clone().requires_grad_()
    perfect = matching_logp(same, target, t, weighting=weighting, power=0.25)
    perfect.sum().backward()
    assert torch.equal(perfect.detach(), torch.zeros(4, dtype=torch.float64))
    assert same.grad is not None and bool(same.grad.isfinite().all())


def test_generalised_huber_with_power_one_is_the_weighting_t():
    torch.manual_seed(0)
    v, target, t = torch.randn(3, 2, 2), torch.randn(3, 2, 2), torch.tensor([0.2, 0.5, 0.8])
    torch.testing.assert_close(
        matching_logp(v, target, t, weighting="ghuber", power=1.0), matching_logp(v, target, t, weighting="t")
    )
    with pytest.raises(ContractError, match="weighting = 'cosine' must be one of uniform, t, t2, huber, ghuber"):
        matching_logp(v, target, t, weighting="cosine")


@pytest.mark.parametrize("rows_per_forward", [None, 4])
def test_the_ratio_is_exactly_one_at_the_first_update_and_not_at_the_second(rows_per_forward: int | None):
    made, resp = made_with(updates=2, micro=2, rows_per_forward=rows_per_forward)
    result = made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0)
    assert result.metrics["policy/first_ratio_max_abs_dev"] == 0.0
    assert result.updates[0]["policy/ratio_mean"] == 1.0
    assert result.updates[1]["policy/ratio_max_abs_dev"] > 0.0


@pytest.mark.parametrize("weighting", MATCHING_WEIGHTINGS)
def test_the_first_gradient_equals_float64_finite_differences(weighting: str):
    made, resp = made_with(weighting=weighting, num_timesteps=2)
    advantages = some_advantages(6)
    rows = noised(made, resp)
    made.stack.train(with_advantages(resp, advantages), progress=0.0)

    def value(theta: Tensor) -> Tensor:
        v = theta[0] * rows["x_t"] + theta[1]
        error = (v - rows["target"]).square().flatten(1).mean(1)
        logp = by_hand(weighting, error, rows["sigma"], 0.25)
        return -(advantages.double().repeat_interleave(2) * logp).mean()

    theta = torch.tensor(START, dtype=torch.float64)
    steps = 1e-5 * torch.eye(2, dtype=torch.float64)
    expected = torch.stack([(value(theta + step) - value(theta - step)) / 2e-5 for step in steps])
    gradients = made.backend.gradients[0]
    found = torch.cat([gradients["transformer.scale"], gradients["transformer.shift"]]).double()
    # The model and the loss compute in float32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_first_gradient_of_uniform_weights_is_the_advantage_weighted_matching_gradient():
    made, resp = made_with(weighting="uniform", num_timesteps=4)
    advantages = some_advantages(6)
    rows = noised(made, resp)
    made.stack.train(with_advantages(resp, advantages), progress=0.0)
    weight = advantages.double().repeat_interleave(4).view(-1, 1, 1, 1)
    residual = START[0] * rows["x_t"] + START[1] - rows["target"]
    # d/dtheta of A mean (v - u)^2 is 2 A mean (v - u) dv/dtheta, and dv is x for the scale, 1 for the shift.
    scale, shift = (2 * weight * residual * rows["x_t"]).mean(), (2 * weight * residual).mean()
    gradients = made.backend.gradients[0]
    assert float(gradients["transformer.scale"]) == pytest.approx(float(scale), rel=1e-4)
    assert float(gradients["transformer.shift"]) == pytest.approx(float(shift), rel=1e-4)


def test_clipping_stops_what_has_gone_far_enough():
    made, resp = made_with(updates=2, lr=0.5, clip_range=1e-3, num_timesteps=2)
    updates = made.stack.train(with_advantages(resp, torch.ones(6)), progress=0.0).updates
    assert updates[0]["policy/clipfrac_high"] == updates[0]["policy/clipfrac_low"] == 0.0
    assert updates[1]["policy/clipfrac_high"] + updates[1]["policy/clipfrac_low"] == 1.0


def test_advantages_are_clipped_before_they_multiply():
    large, resp = made_with(advantage_clip=1.0)
    large.stack.train(with_advantages(resp, torch.tensor([9.0, -9.0, 1.0, -1.0, 0.5, 0.0])), progress=0.0)
    small, _ = made_with(advantage_clip=None)
    small.stack.train(with_advantages(resp, torch.tensor([1.0, -1.0, 1.0, -1.0, 0.5, 0.0])), progress=0.0)
    for name, gradient in small.backend.gradients[0].items():
        assert torch.equal(large.backend.gradients[0][name], gradient)


@pytest.mark.parametrize(
    ("coefficient", "metric", "options"),
    [
        ("kl_coef", "policy/reference_kl", {"keep_reference": True}),
        ("ema_kl_coef", "awm/ema_kl", {"backend_options": {"ema": EMAConfig(decay=0.9, warmup=False)}}),
    ],
)
def test_a_penalty_pulls_towards_the_policy_that_it_names(coefficient: str, metric: str, options: dict[str, Any]):
    made, resp = made_with(**{coefficient: 10.0}, **options)
    displace(made.backend, 0.3)
    moved = {
        name: float(made.parameters[name]) - start
        for name, start in zip(("transformer.scale", "transformer.shift"), START, strict=True)
    }
    metrics = made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0).metrics
    # Without advantages only the penalty is left. It is quadratic in the displacement: displacement times gradient is
    # twice its value.
    along = sum(moved[name] * float(made.backend.gradients[0][name]) for name in moved)
    assert along == pytest.approx(2 * 10.0 * metrics[metric], rel=1e-4)
    assert along > 1e-2


def test_the_penalty_towards_an_average_needs_one():
    made, resp = made_with(ema_kl_coef=1.0)
    with pytest.raises(ConfigError, match=r"set backend\.ema"):
        made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_range": 0.0}, r"clip_range = 0.0 must lie in \(0, 1\]"),
        ({"advantage_clip": 0.0}, "advantage_clip = 0.0 must be above 0"),
        ({"weighting": "snr"}, "weighting = 'snr' must be one of uniform, t, t2, huber, ghuber"),
        ({"ghuber_power": 0.0}, r"ghuber_power = 0.0 must lie in \(0, 1\]"),
        ({"ema_kl_coef": -1.0}, "ema_kl_coef = -1.0 must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        setup(AWM, **options)
