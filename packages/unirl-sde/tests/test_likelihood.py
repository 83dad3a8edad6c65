import math
from typing import Any

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from unirl.sde.forward import interpolate, predict_noise, predict_x0, velocity_target
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.likelihood import code_kl, gaussian_log_density, gaussian_log_prob, transition_kl

# float32 against float64 over 60 elements: 1e-5 relative.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    y, p, q = (torch.randn(2, 3, 4, 5, generator=generator) for _ in range(3))
    return y, p, q, torch.tensor([0.3, 1.7])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gaussian_log_prob_equals_torch_distributions(tensors, reduction):
    y, mean, _, std_R = tensors
    each = Normal(mean.double(), std_R.double().view(2, 1, 1, 1)).log_prob(y.double()).flatten(1)
    expected = each.mean(1) if reduction == "mean" else each.sum(1)
    torch.testing.assert_close(gaussian_log_prob(y, mean, std_R, reduction).double(), expected, **TOLERANCE)


def test_gaussian_log_density_takes_a_deviation_of_each_element(tensors):
    """Against torch.distributions, value and gradient of the deviation; float32, a few roundings."""
    y, mean, *_ = tensors
    std = torch.rand_like(mean) + 0.1
    ours, theirs = (std.clone().requires_grad_() for _ in range(2))
    found = gaussian_log_density(y, mean, ours)
    expected = torch.distributions.Normal(mean, theirs).log_prob(y)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-4)
    with pytest.raises(ValueError, match="std_R"):
        gaussian_log_density(y, mean, std[:, :1])


def test_gaussian_log_density_has_the_terms_of_the_sum(tensors):
    y, mean, _, std_R = tensors
    each = gaussian_log_density(y, mean, std_R)
    torch.testing.assert_close(each.flatten(1).sum(1), gaussian_log_prob(y, mean, std_R, "sum"), **TOLERANCE)
    expected = Normal(mean.double(), std_R.double().view(2, 1, 1, 1)).log_prob(y.double())
    torch.testing.assert_close(each.double(), expected, **TOLERANCE)


def test_sum_is_the_number_of_elements_times_mean(tensors):
    y, mean, other, std_R = tensors
    for function, arguments in ((gaussian_log_prob, (y, mean, std_R)), (transition_kl, (mean, other, std_R))):
        torch.testing.assert_close(function(*arguments, "sum"), 60 * function(*arguments, "mean"), **TOLERANCE)


def test_the_action_carries_no_gradient(tensors):
    y, mean, _, std_R = tensors
    y.requires_grad_()
    mean.requires_grad_()
    gaussian_log_prob(y, mean, std_R, "mean").sum().backward()
    assert y.grad is None and mean.grad is not None


def test_rows_without_further_dimensions_have_one_element():
    logp = gaussian_log_prob(torch.zeros(3), torch.zeros(3), torch.ones(3), "sum")
    assert logp.tolist() == pytest.approx([-0.5 * math.log(2 * math.pi)] * 3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_transition_kl_equals_torch_distributions(tensors, reduction):
    _, p, q, std_R = tensors
    std = std_R.double().view(2, 1, 1, 1)
    each = kl_divergence(Normal(p.double(), std), Normal(q.double(), std)).flatten(1)
    expected = each.mean(1) if reduction == "mean" else each.sum(1)
    torch.testing.assert_close(transition_kl(p, q, std_R, reduction).double(), expected, **TOLERANCE)
    torch.testing.assert_close(transition_kl(q, p, std_R, reduction), transition_kl(p, q, std_R, reduction))


def test_code_kl_is_the_exact_kl_times_the_step(tensors):
    x, v, other, _ = tensors
    sigma_R, sigma_next_R = torch.tensor([0.9, 0.5]), torch.tensor([0.8, 0.2])
    kernel = FlowSDEStrategy()
    p = kernel.transition(x, v, sigma_R, sigma_next_R, eta=0.7, sigma_max=0.9)
    q = kernel.transition(x, other, sigma_R, sigma_next_R, eta=0.7, sigma_max=0.9)
    assert p.q_R is not None
    exact_R = transition_kl(p.mean, q.mean, p.std_R)
    torch.testing.assert_close(code_kl(p.mean, q.mean, p.q_R), (sigma_R - sigma_next_R) * exact_R, **TOLERANCE)
    # The paper writes the same as -dt/2 (q (1 - sigma) / (2 sigma) + 1 / q)^2 (v - v_ref)^2.
    weight_R = (sigma_R - sigma_next_R) / 2 * (p.q_R * (1 - sigma_R) / (2 * sigma_R) + 1 / p.q_R) ** 2
    torch.testing.assert_close(weight_R * (v - other).square().flatten(1).mean(1), exact_R, **TOLERANCE)


def test_forward_process_and_predictions_invert_each_other(tensors):
    x0, noise, _, _ = tensors
    sigma_R = torch.tensor([0.25, 0.9])
    x, v = interpolate(x0, noise, sigma_R), velocity_target(x0, noise)
    torch.testing.assert_close(x[0], 0.75 * x0[0] + 0.25 * noise[0])
    torch.testing.assert_close(predict_x0(x, v, sigma_R), x0)
    torch.testing.assert_close(predict_noise(x, v, sigma_R), noise)
    assert torch.equal(interpolate(x0, noise, torch.zeros(2)), x0)
    assert torch.equal(interpolate(x0, noise, torch.ones(2)), noise)


def test_shapes_and_reductions_are_checked(tensors):
    y, mean, other, std_R = tensors
    with pytest.raises(ValueError, match=r"y has shape \(2, 3, 4, 4\)"):
        gaussian_log_prob(y[..., :4], mean, std_R, "mean")
    with pytest.raises(ValueError, match=r"std_R has shape \(1,\)"):
        transition_kl(mean, other, std_R[:1])
    with pytest.raises(ValueError, match=r"sigma_R has shape \(\)"):
        interpolate(y, mean, torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"noise has shape"):
        velocity_target(y, mean[:1])
    with pytest.raises(ValueError, match="leading row dimension"):
        predict_x0(torch.tensor(1.0), torch.tensor(1.0), std_R)
