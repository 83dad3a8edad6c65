"""Loss mathematics against hand-worked cases, identities and float64 finite differences."""

import math

import pytest
import torch

from unirl.algorithms.diffusion_nft import mode_advantages
from unirl.algorithms.kl import AdaptiveKL, adapted_coefficient
from unirl.algorithms.losses import clipped_surrogate, nft_loss, optimality, velocity_distance
from unirl.algorithms.schedules import OldPolicyDecay, clip_factor
from unirl.types.errors import ConfigError, ContractError


def surrogate(logp, anchor, advantage, low=0.1, high=0.2):
    return clipped_surrogate(logp, anchor, advantage, clip_low=low, clip_high=high)


def test_gradient_at_ratio_one_is_minus_the_advantage():
    logp = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    surrogate(logp, logp.detach(), advantage)[0].sum().backward()
    torch.testing.assert_close(logp.grad, -advantage, rtol=0, atol=0)


def test_clipping_stops_the_gradient_only_in_the_direction_that_would_go_further():
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    logp = ratio.log().requires_grad_()
    loss, rows = surrogate(logp, torch.zeros(4, dtype=torch.float64), advantage)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([0.0, 0.0, 1.5, -0.5], dtype=torch.float64))
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.2, 0.9, 1.5, -0.5], dtype=torch.float64))
    assert rows["clipped_high"].tolist() == [1, 0, 1, 0]
    assert rows["clipped_low"].tolist() == [0, 1, 0, 1]


def test_the_anchor_carries_no_gradient():
    anchor = torch.zeros(2, requires_grad=True)
    logp = torch.zeros(2, requires_grad=True)
    surrogate(logp, anchor, torch.ones(2))[0].sum().backward()
    assert anchor.grad is None


def test_shapes_that_disagree_are_named():
    with pytest.raises(ContractError, match="advantage_R"):
        surrogate(torch.zeros(2), torch.zeros(2), torch.zeros(3))


def nft_case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(3, 2, 4, generator=generator, dtype=dtype)  # noqa: E731
    return draw(), draw(), draw(), torch.tensor([0.2, 0.5, 0.9], dtype=dtype)


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 2.0])
def test_nft_first_gradient_is_the_advantage_weighted_flow_matching_gradient_for_any_beta(beta):
    x_t, x0, v_old, sigma = nft_case()
    advantage = torch.tensor([1.5, -0.7, 0.0], dtype=torch.float64)
    v = v_old.clone().requires_grad_()
    loss = nft_loss(v, v_old, x_t, x0, sigma, optimality(advantage, advantage_max=5.0), beta=beta, advantage_max=5.0)
    loss.loss_R.sum().backward()
    w = v_old.clone().requires_grad_()
    x0_hat = x_t - sigma.view(-1, 1, 1) * w
    weight = (x0_hat - x0).abs().mean(dim=(1, 2), keepdim=True).detach().clamp(min=1e-5)
    (advantage * ((x0_hat - x0).square() / weight).mean(dim=(1, 2))).sum().backward()
    torch.testing.assert_close(v.grad, w.grad, rtol=1e-9, atol=1e-12)


def test_nft_with_full_advantage_uses_one_branch_only():
    x_t, x0, v_old, sigma = nft_case()
    v = v_old + 0.1
    good = nft_loss(v, v_old, x_t, x0, sigma, torch.ones(3, dtype=torch.float64), beta=1.0, advantage_max=5.0)
    torch.testing.assert_close(good.loss_R, 5.0 * good.positive_R)
    bad = nft_loss(v, v_old, x_t, x0, sigma, torch.zeros(3, dtype=torch.float64), beta=1.0, advantage_max=5.0)
    torch.testing.assert_close(bad.loss_R, 5.0 * bad.negative_R)


def test_nft_gradient_equals_float64_finite_differences_without_the_adaptive_weight():
    x_t, x0, v_old, sigma = nft_case()
    r = torch.tensor([0.9, 0.2, 0.5], dtype=torch.float64)

    def value(scale):
        v = v_old * scale[0] + x_t * scale[1]
        return nft_loss(v, v_old, x_t, x0, sigma, r, beta=0.7, advantage_max=3.0, adaptive_weight=False).loss_R.sum()

    theta = torch.tensor([1.1, 0.2], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(value(theta), theta)
    for i in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[i] = 1e-6
        numeric = (value(theta.detach() + step) - value(theta.detach() - step)) / 2e-6
        assert math.isclose(float(numeric), float(gradient[i]), rel_tol=1e-6)


def test_optimality_maps_the_clipped_advantage_to_the_unit_interval():
    got = optimality(torch.tensor([-9.0, -5.0, 0.0, 2.5, 9.0]), advantage_max=5.0)
    assert got.tolist() == [0.0, 0.0, 0.5, 0.75, 1.0]


def test_advantage_modes():
    a = torch.tensor([-2.0, 0.0, 3.0])
    assert mode_advantages(a, "all").tolist() == [-2, 0, 3]
    assert mode_advantages(a, "positive_only").tolist() == [0, 0, 3]
    assert mode_advantages(a, "negative_only").tolist() == [-2, 0, 0]
    assert mode_advantages(a, "one_only").tolist() == [0, 0, 1]
    assert mode_advantages(a, "binary").tolist() == [-1, 0, 1]


def test_velocity_distance_has_no_gradient_at_the_reference():
    v = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    distance = velocity_distance(v, v.detach())
    (gradient,) = torch.autograd.grad(distance.sum(), v)
    assert torch.equal(distance.detach(), torch.zeros(2)) and torch.equal(gradient, torch.zeros(2, 3))


def test_adaptive_coefficient_moves_towards_the_target_and_is_clipped():
    assert adapted_coefficient(1.0, 2.0, target=1.0, horizon=10, num_samples=5) == pytest.approx(1.1)
    assert adapted_coefficient(1.0, 0.0, target=1.0, horizon=10, num_samples=5) == pytest.approx(0.9)
    assert adapted_coefficient(1.0, 1.1, target=1.0, horizon=10, num_samples=10) == pytest.approx(1.1)
    with pytest.raises(ConfigError, match="target = 0.0 must be above 0"):
        AdaptiveKL(target=0.0, horizon=1.0)


def test_clip_schedules_and_old_policy_decay_by_hand():
    assert clip_factor("constant", 0.7) == 1.0
    assert clip_factor("linear_decay", 1.0) == 0.5
    assert clip_factor("cosine_decay", 0.5) == pytest.approx(0.5)
    ocr = OldPolicyDecay(flat=75, rate=0.0075, cap=0.999)
    assert [ocr(0), ocr(74), ocr(75), ocr(77), ocr(10**6)] == pytest.approx([0, 0, 0, 0.015, 0.999])
    with pytest.raises(ConfigError, match="cap"):
        OldPolicyDecay(cap=1.5)
