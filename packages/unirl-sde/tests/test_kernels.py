import math
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.sde.kernels import (
    ConsistencySDEStrategy,
    CPSSDEStrategy,
    DanceSDEStrategy,
    DDIMStrategy,
    FlashSDEStrategy,
    FlowSDEStrategy,
    SDEStrategy,
)
from unirl.sde.likelihood import transition_kl
from unirl.sde.schedule import diffusers_sigmas, linear_sigmas

KERNELS = [FlowSDEStrategy, DanceSDEStrategy, FlashSDEStrategy, CPSSDEStrategy, ConsistencySDEStrategy, DDIMStrategy]
SHAPE = (3, 2, 4, 5)
N = 2 * 4 * 5
SIGMA_R = torch.tensor([1.0, 0.75, 0.4286])
SIGMA_NEXT_R = torch.tensor([0.9643, 0.5, 0.25])
SIGMA_MAX = 0.9643


def draw(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference_step(name: str, x: Tensor, v: Tensor, sigma: float, sigma_next: float, eta: float, sigma_max: float):
    """Mean and std of one row in float64, from the papers: drift plus score for the SDEs, kept noise for the others."""
    x, v = x.double(), v.double()
    x0, eps = x - sigma * v, x + (1 - sigma) * v
    if name in ("cps", "consistency", "ddim"):
        share = math.sin(eta * math.pi / 2)
        if name == "ddim":
            share = eta * math.sqrt(1 - (sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))) ** 2)
        c = sigma_next * share
        return (1 - sigma_next) * x0 + math.sqrt(max(sigma_next**2 - c**2, 0)) * eps, c
    dt = sigma_next - sigma
    q = eta * {"dance": 1.0, "flash": sigma_max * sigma}.get(
        name, math.sqrt(sigma / (1 - (sigma_max if sigma == 1 else sigma)))
    )
    score = -(x - (1 - sigma) * x0) / sigma**2
    return x + (v - q**2 / 2 * score) * dt, q * math.sqrt(-dt)


def reference_logp(name: str, y: Tensor, mean: Tensor, std: float, reduction: str) -> float:
    y = y.double()
    each = -((y - mean) ** 2) if name == "cps" else torch.distributions.Normal(mean, std).log_prob(y)
    return (each.mean() if reduction == "mean" else each.sum()).item()


def take_step(kernel: SDEStrategy, eta: float = 0.7, **given: Any):
    inputs: dict[str, Any] = {
        "x": draw(0),
        "velocity": draw(1),
        "sigma_R": SIGMA_R,
        "sigma_next_R": SIGMA_NEXT_R,
        **given,
    }
    return kernel.step(**inputs, eta=eta, sigma_max=SIGMA_MAX)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("kernel_class", KERNELS)
def test_step_agrees_with_a_float64_reference_and_torch_distributions(kernel_class, eta, reduction):
    # float32 arithmetic against float64: 1e-5 relative leaves a margin over N = 40 additions.
    kernel = kernel_class(reduction=reduction)
    out = take_step(kernel, eta=eta, noise=draw(2))
    for row in range(3):
        mean, std = reference_step(
            kernel.name, draw(0)[row], draw(1)[row], SIGMA_R[row].item(), SIGMA_NEXT_R[row].item(), eta, SIGMA_MAX
        )
        torch.testing.assert_close(out.mean[row].double(), mean, rtol=1e-5, atol=1e-5)
        assert out.std_R[row].item() == pytest.approx(std, rel=1e-5)
        expected = reference_logp(kernel.name, out.next[row], mean, std, reduction)
        assert out.logp_R[row].item() == pytest.approx(expected, rel=2e-5, abs=2e-5)
        torch.testing.assert_close(out.next[row].double(), mean + std * draw(2)[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_evaluating_the_sampled_latent_gives_the_sampled_log_prob_bit_for_bit(kernel_class):
    kernel = kernel_class()
    sampled = take_step(kernel, noise=draw(2))
    evaluated = take_step(kernel, next_sample=sampled.next)
    assert torch.equal(sampled.logp_R, evaluated.logp_R)
    assert torch.equal(sampled.mean, evaluated.mean)


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_log_prob_belongs_to_the_rounded_latent(kernel_class):
    kernel = kernel_class()
    out = take_step(kernel, noise=draw(2), storage_dtype=torch.bfloat16)
    assert out.next.dtype == torch.float32
    assert torch.equal(out.next, out.next.to(torch.bfloat16).float())
    stored = out.next.to(torch.bfloat16)
    assert torch.equal(take_step(kernel, next_sample=stored).logp_R, out.logp_R)
    assert not torch.equal(take_step(kernel, noise=draw(2)).logp_R, out.logp_R)


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_half_precision_inputs_are_computed_in_float32(kernel_class):
    x, v = draw(0, torch.bfloat16), draw(1, torch.bfloat16)
    kernel = kernel_class()
    out = take_step(kernel, x=x, velocity=v, noise=draw(2))
    upcast = take_step(kernel, x=x.float(), velocity=v.float(), noise=draw(2))
    assert out.mean.dtype == out.next.dtype == out.logp_R.dtype == torch.float32
    assert torch.equal(out.next, upcast.next)
    assert torch.equal(out.logp_R, upcast.logp_R)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kernel_class", KERNELS)
def test_gradient_with_respect_to_velocity_is_the_closed_form(kernel_class, reduction):
    """d logp / d v = kappa (y - mean) / (N s^2), and 2 kappa (y - mean) / N for CPS, kappa = d mean / d v."""
    kernel, eta = kernel_class(reduction=reduction), 0.7
    v = draw(1).requires_grad_()
    out = take_step(kernel, eta=eta, velocity=v, noise=draw(2))
    (gradient,) = torch.autograd.grad(out.logp_R.sum(), v)
    share = N if reduction == "mean" else 1
    for row in range(3):
        sigma, sigma_next = SIGMA_R[row].item(), SIGMA_NEXT_R[row].item()
        y, mean, std = out.next[row].detach().double(), out.mean[row].detach().double(), out.std_R[row].item()
        if kernel.name in ("cps", "consistency", "ddim"):
            kappa = -sigma * (1 - sigma_next) + (1 - sigma) * math.sqrt(max(sigma_next**2 - std**2, 0))
            expected = kappa * (y - mean) / share * (2 if kernel.name == "cps" else 1 / std**2)
        else:
            dt = sigma_next - sigma
            q = std / math.sqrt(-dt)
            kappa = dt * (1 + q**2 * (1 - sigma) / (2 * sigma))
            expected = kappa * (y - mean) / (share * std**2)
        # atol: y - mean is a float32 difference, so its relative error grows where it is small.
        torch.testing.assert_close(gradient[row].double(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_gradient_agrees_with_float64_finite_differences(kernel_class):
    kernel, eta, row, step = kernel_class(), 0.7, 1, 1e-5
    x, v, y = draw(0), draw(1), draw(3)
    velocity = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        take_step(kernel, eta=eta, velocity=velocity, next_sample=y).logp_R.sum(), velocity
    )

    def logp(v_row: Tensor) -> float:
        sigma, sigma_next = SIGMA_R[row].item(), SIGMA_NEXT_R[row].item()
        mean, std = reference_step(kernel.name, x[row], v_row, sigma, sigma_next, eta, SIGMA_MAX)
        return reference_logp(kernel.name, y[row], mean, std, "mean")

    for element in (0, 17, 39):
        nudge = torch.zeros(N, dtype=torch.float64)
        nudge[element] = step
        nudge = nudge.view(SHAPE[1:])
        difference = (logp(v[row].double() + nudge) - logp(v[row].double() - nudge)) / (2 * step)
        assert gradient[row].flatten()[element].item() == pytest.approx(difference, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("kernel_class", [FlowSDEStrategy, DanceSDEStrategy, FlashSDEStrategy, DDIMStrategy])
def test_log_ratio_is_the_noise_along_the_shift_minus_the_kl(kernel_class):
    """log r = mean(eps Delta) / s - K with K the exact KL; E = -K and Var = 2 K / N over the noise."""
    num_draws, elements, shift = 4000, 64, 0.3
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, elements, generator=generator).expand(num_draws, -1)
    v_old = torch.randn(1, elements, generator=generator).expand(num_draws, -1)
    v_new = v_old + shift * torch.randn(1, elements, generator=generator)
    noise = torch.randn(num_draws, elements, generator=generator)
    kernel = kernel_class()
    sigmas = (torch.full((num_draws,), 0.6), torch.full((num_draws,), 0.45))
    old = kernel.step(x, v_old, *sigmas, eta=0.7, sigma_max=0.9, noise=noise)
    new = kernel.step(x, v_new, *sigmas, eta=0.7, sigma_max=0.9, next_sample=old.next)
    log_ratio_R = new.logp_R - old.logp_R
    kl_R = transition_kl(old.mean, new.mean, old.std_R)
    identity = (noise * (new.mean - old.mean)).mean(dim=1) / old.std_R - kl_R
    torch.testing.assert_close(log_ratio_R, identity, rtol=0, atol=5e-6)
    kl = kl_R[0].item()
    variance = 2 * kl / elements
    # Monte Carlo over 4000 draws: the mean is known to std / 63, the variance to about 2.2 per cent.
    assert log_ratio_R.mean().item() == pytest.approx(-kl, abs=4 * math.sqrt(variance / num_draws))
    assert log_ratio_R.var().item() == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_eta_zero_is_euler_without_a_log_prob(kernel_class):
    kernel = kernel_class()
    out = take_step(kernel, eta=0.0)
    dt = (SIGMA_NEXT_R - SIGMA_R).view(-1, 1, 1, 1)
    assert torch.equal(out.next, draw(0) + draw(1) * dt)
    assert out.logp_R is None
    assert torch.equal(out.std_R, torch.zeros(3))
    assert torch.equal(take_step(kernel, eta=0.0, noise=draw(2)).next, out.next)


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_the_limit_of_small_eta_is_euler(kernel_class):
    euler = take_step(kernel_class(), eta=0.0).next
    for eta, tolerance in ((1e-2, 5e-2), (1e-3, 5e-3), (1e-4, 5e-4)):
        assert (take_step(kernel_class(), eta=eta, noise=draw(2)).next - euler).abs().max() < tolerance
    # The mean is Euler to second order in eta.
    torch.testing.assert_close(take_step(kernel_class(), eta=1e-4, noise=draw(2)).mean, euler, rtol=1e-5, atol=1e-5)


def marginal_variance(kernel: SDEStrategy, sigmas: list[float], eta: float) -> float:
    """Variance of x_sigma about (1 - sigma) x0 after the steps, with the exact velocity of one known x0.

    Then eps_hat = u / sigma for u = x - (1 - sigma) x0, the step is linear in u, and with x0 = 0 its factor is the mean
    of u = 1 under v = 1 / sigma.
    """
    variance = sigmas[0] ** 2
    for sigma, sigma_next in zip(sigmas, sigmas[1:], strict=False):
        one = torch.ones(1, 1)
        transition = kernel.transition(
            one, one / sigma, torch.tensor([sigma]), torch.tensor([sigma_next]), eta=eta, sigma_max=0.9
        )
        variance = transition.mean.item() ** 2 * variance + transition.std_R.item() ** 2
    return variance


@pytest.mark.parametrize("kernel_class", [CPSSDEStrategy, DDIMStrategy])
@pytest.mark.parametrize("eta", [0.2, 0.7, 1.0])
def test_cps_and_ddim_preserve_the_marginal_exactly(kernel_class, eta):
    for sigmas in ([0.6, 0.45], [1.0, 0.6, 0.1], [0.9, 0.0]):
        assert marginal_variance(kernel_class(), sigmas, eta) == pytest.approx(sigmas[-1] ** 2, abs=1e-6)


@pytest.mark.parametrize(("substeps", "measured"), [(1, 0.2381), (2, 0.2157), (4, 0.2083), (8, 0.2048)])
def test_flow_sde_has_excess_variance_that_vanishes_with_the_step(substeps, measured):
    # The literature's values are Monte Carlo, hence 6e-4; the target is 0.45^2 = 0.2025.
    sigmas = torch.linspace(0.6, 0.45, substeps + 1, dtype=torch.float64).tolist()
    assert marginal_variance(FlowSDEStrategy(), sigmas, 0.7) == pytest.approx(measured, abs=6e-4)


def test_flow_and_dance_agree_when_their_diffusion_coefficients_do():
    sigma = 0.75
    dance_eta = 0.7 * math.sqrt(sigma / (1 - sigma))
    rows = {"sigma_R": torch.full((3,), sigma), "sigma_next_R": torch.full((3,), 0.5)}
    flow = take_step(FlowSDEStrategy(), eta=0.7, noise=draw(2), **rows)
    dance = take_step(DanceSDEStrategy(), eta=dance_eta, noise=draw(2), **rows)
    torch.testing.assert_close(flow.next, dance.next, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(flow.logp_R, dance.logp_R, rtol=1e-6, atol=1e-6)


def test_short_ddim_steps_are_those_of_the_flow_kernel_with_more_noise():
    """q of DDIM tends to eta sqrt(2 sigma / (1 - sigma)); first order in the step, so ten times closer at a tenth."""
    eta, sigma = 0.5, torch.full((3,), 0.6)
    gaps = []
    for length in (1e-2, 1e-3):
        given = {"sigma_R": sigma, "sigma_next_R": sigma - length, "noise": draw(2)}
        flow, ddim = take_step(FlowSDEStrategy(), eta * math.sqrt(2), **given), take_step(DDIMStrategy(), eta, **given)
        gaps.append((flow.std_R / ddim.std_R - 1).abs().max().item())
        drift = (flow.mean - draw(0)).norm() / length
        assert (flow.mean - ddim.mean).norm() / length < 3 * length * drift
    assert gaps[1] == pytest.approx(gaps[0] / 10, rel=0.2)


@pytest.mark.parametrize("sigma", [1.0, 1 - 1e-7])
def test_sigma_one_takes_the_second_sigma_of_the_schedule(sigma):
    x = torch.zeros(1, 4)
    for sigmas in (linear_sigmas(10), diffusers_sigmas(10)):
        sigma_max = sigmas[1].item()
        transition = FlowSDEStrategy().transition(
            x, x, torch.tensor([sigma]), sigmas[1:2], eta=0.7, sigma_max=sigma_max
        )
        assert transition.q_R is not None
        assert transition.q_R.item() == pytest.approx(0.7 / math.sqrt(1 - sigma_max), rel=1e-6)


def test_std_and_q_differ_by_the_root_of_the_step():
    for kernel in (FlowSDEStrategy(), DanceSDEStrategy(), DDIMStrategy()):
        out = kernel.transition(draw(0), draw(1), SIGMA_R, SIGMA_NEXT_R, eta=0.7, sigma_max=SIGMA_MAX)
        assert out.q_R is not None
        torch.testing.assert_close(out.std_R, out.q_R * (SIGMA_R - SIGMA_NEXT_R).sqrt())
    assert CPSSDEStrategy().transition(draw(0), draw(1), SIGMA_R, SIGMA_NEXT_R, eta=0.7, sigma_max=0.9).q_R is None


def test_last_step_std_shows_why_the_diffusers_schedule_drops_it():
    last = [
        FlowSDEStrategy().transition(torch.zeros(1, 1), torch.zeros(1, 1), s[-2:-1], s[-1:], eta=0.7, sigma_max=0.9)
        for s in (diffusers_sigmas(10), linear_sigmas(10))
    ]
    assert last[0].std_R.item() == pytest.approx(0.0063, abs=1e-4)
    assert last[1].std_R.item() == pytest.approx(0.2021, abs=1e-4)


def test_cps_last_step_is_clean_with_log_prob_zero():
    out = CPSSDEStrategy().step(
        draw(0), draw(1), torch.full((3,), 0.25), torch.zeros(3), eta=0.8, sigma_max=0.9, noise=draw(2)
    )
    torch.testing.assert_close(out.next, draw(0) - 0.25 * draw(1))
    assert out.logp_R is not None
    assert torch.equal(out.logp_R, torch.zeros(3))


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_rows_are_independent(kernel_class):
    # Elementwise arithmetic does not depend on the batch; the reduction may add in another order, hence 1e-6 on logp.
    kernel = kernel_class()
    whole = take_step(kernel, noise=draw(2))
    for row in range(3):
        one = slice(row, row + 1)
        alone = kernel.step(
            draw(0)[one],
            draw(1)[one],
            SIGMA_R[one],
            SIGMA_NEXT_R[one],
            eta=0.7,
            sigma_max=SIGMA_MAX,
            noise=draw(2)[one],
        )
        assert torch.equal(alone.next, whole.next[one])
        torch.testing.assert_close(alone.logp_R, whole.logp_R[one], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel_class", KERNELS)
@pytest.mark.parametrize("eta", [-0.1, math.nan, math.inf])
def test_bad_eta_is_named(kernel_class, eta):
    with pytest.raises(ValueError, match=f"eta = {eta}"):
        take_step(kernel_class(), eta=eta, noise=draw(2))


@pytest.mark.parametrize("kernel_class", [CPSSDEStrategy, DDIMStrategy])
def test_eta_above_one_is_an_error_where_it_is_a_share(kernel_class):
    with pytest.raises(ValueError, match=rf"eta = 1.5 of the {kernel_class.name} kernel must lie in \[0, 1\]"):
        take_step(kernel_class(), eta=1.5, noise=draw(2))


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_common_mistakes_are_named(kernel_class):
    kernel = kernel_class()
    with pytest.raises(ValueError, match="both noise and next_sample"):
        take_step(kernel, noise=draw(2), next_sample=draw(3))
    with pytest.raises(ValueError, match="neither noise nor next_sample, and eta = 0.7"):
        take_step(kernel)
    with pytest.raises(ValueError, match=r"velocity has shape \(3, 2, 4, 4\)"):
        take_step(kernel, velocity=draw(1)[..., :4], noise=draw(2))
    with pytest.raises(ValueError, match=r"noise has shape \(1, 2, 4, 5\)"):
        take_step(kernel, noise=draw(2)[:1])
    with pytest.raises(ValueError, match=r"sigma_R has shape \(2,\)"):
        take_step(kernel, sigma_R=SIGMA_R[:2], noise=draw(2))
    with pytest.raises(ValueError, match="sigma_max = 1"):
        kernel.step(draw(0), draw(1), SIGMA_R, SIGMA_NEXT_R, eta=0.7, sigma_max=1.0, noise=draw(2))
    with pytest.raises(ValueError, match="reduction = 'median'"):
        kernel_class(reduction="median")


def test_only_cps_is_not_gaussian_and_densities_without_noise_take_no_last_step():
    assert [(kernel.name, kernel.is_gaussian) for kernel in KERNELS] == [
        ("flow", True),
        ("dance", True),
        ("flash", True),
        ("cps", False),
        ("consistency", True),
        ("ddim", True),
    ]
    assert [kernel.name for kernel in KERNELS if not kernel.takes_last_step] == ["consistency", "ddim"]


def test_ddim_with_all_its_noise_is_the_stochastic_dpm_solver_of_first_order():
    """diffusers' "sde-dpmsolver++" of order 1 along Sana's grid, every step but the last, which has no noise."""
    scheduler = pytest.importorskip("diffusers").DPMSolverMultistepScheduler(
        algorithm_type="sde-dpmsolver++",
        solver_order=1,
        use_flow_sigmas=True,
        flow_shift=3.0,
        prediction_type="flow_prediction",
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(8)
    sigmas = scheduler.sigmas.float()
    x, kernel = draw(0), DDIMStrategy()
    for step in range(7):
        velocity, noise = draw(10 + step), draw(20 + step)
        sigma_R, sigma_next_R = sigmas[step].expand(3), sigmas[step + 1].expand(3)
        ours = kernel.step(x, velocity, sigma_R, sigma_next_R, eta=1.0, sigma_max=float(sigmas[1]), noise=noise)
        theirs = scheduler.step(velocity, scheduler.timesteps[step], x, variance_noise=noise).prev_sample
        torch.testing.assert_close(ours.next, theirs, rtol=1e-4, atol=1e-5)
        density = torch.distributions.Normal(ours.mean.double(), ours.std_R.double().view(3, 1, 1, 1))
        expected = density.log_prob(ours.next.double()).flatten(1).mean(dim=1)
        assert ours.logp_R is not None
        torch.testing.assert_close(ours.logp_R.double(), expected, rtol=1e-4, atol=1e-4)
        x = theirs


def test_consistency_steps_noise_the_predicted_clean_latent_anew():
    """With eta = 1: N((1 - sigma') x0, sigma'^2), by torch's own density; other than that the latent is CPS's."""
    out = take_step(ConsistencySDEStrategy(), eta=1.0, noise=draw(2))
    x0 = draw(0).double() - SIGMA_R.double().view(3, 1, 1, 1) * draw(1).double()
    following = SIGMA_NEXT_R.double().view(3, 1, 1, 1)
    mean = (1 - following) * x0
    torch.testing.assert_close(out.next.double(), mean + following * draw(2).double(), rtol=1e-5, atol=1e-5)
    assert out.logp_R is not None
    expected = torch.distributions.Normal(mean, following).log_prob(out.next.double()).flatten(1).mean(dim=1)
    torch.testing.assert_close(out.logp_R.double(), expected, rtol=2e-5, atol=2e-5)
    cps = take_step(CPSSDEStrategy(), eta=1.0, noise=draw(2))
    assert torch.equal(cps.next, out.next) and not torch.equal(cps.logp_R, out.logp_R)
