"""DDIM in the coordinates of flow matching against diffusers' schedulers, scipy and the formulas of the papers."""

import math
from typing import Any

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.sde.kernels import DDIMStrategy
from unirl.sde.loop import replay, sample, transition_rows
from unirl.sde.timesteps import TimestepSchedule
from unirl.sde.variance_preserving import (
    PredictionType,
    alphas_cumprod_of,
    flow_scale,
    flow_velocity,
    from_flow,
    published_log_prob,
    sigma_of,
    to_flow,
)

diffusers: Any = pytest.importorskip("diffusers")

SDXL: dict[str, Any] = {"timestep_spacing": "leading", "steps_offset": 1}
COGVIDEOX: dict[str, Any] = {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True, "snr_shift_scale": 3.0}
SHAPE = (2, 4, 3, 5)
N = 4 * 3 * 5


def ddim_scheduler(schedule: TimestepSchedule, prediction_type: str, num_steps: int) -> Any:
    """diffusers' scheduler with the levels of ours, in float64, so that its steps are a float64 reference."""
    scheduler = diffusers.DDIMScheduler(
        prediction_type=prediction_type,
        clip_sample=False,
        timestep_spacing=schedule.timestep_spacing,
        steps_offset=schedule.steps_offset,
        set_alpha_to_one=schedule.set_alpha_to_one,
    )
    scheduler.alphas_cumprod = schedule.alphas_cumprod()
    scheduler.final_alpha_cumprod = (
        torch.ones(()).double() if schedule.set_alpha_to_one else schedule.alphas_cumprod()[0]
    )
    scheduler.set_timesteps(num_steps)
    return scheduler


def draw(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(sigma: Tensor) -> Tensor:
    return sigma.expand(SHAPE[0])


def our_step(z: Tensor, output: Tensor, sigmas: Tensor, index: int, prediction_type: Any, eta: float, **given: Any):
    sigma, sigma_next = rows(sigmas[index]), rows(sigmas[index + 1])
    x = to_flow(z.float(), sigma)
    v = flow_velocity(output.float(), x, sigma, prediction_type)
    return DDIMStrategy(reduction="sum").step(x, v, sigma, sigma_next, eta=eta, sigma_max=sigmas[1].item(), **given)


@pytest.mark.parametrize("set_alpha_to_one", [True, False])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("settings_", [SDXL, COGVIDEOX], ids=["sdxl", "cogvideox"])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_step_equals_diffusers_ddim_in_mean_and_std(prediction_type, settings_, eta, set_alpha_to_one):
    # float32 against float64, where epsilon divides by 1 - sigma >= 0.06: 1e-5 of the latents' unit.
    schedule = TimestepSchedule(**settings_, set_alpha_to_one=set_alpha_to_one)
    num_steps = 20
    scheduler = ddim_scheduler(schedule, prediction_type, num_steps)
    sigmas = schedule.sigmas(num_steps)
    assert torch.equal(scheduler.timesteps, schedule.timesteps(num_steps))
    z, output, noise = draw(0), draw(1), draw(2)
    # From pure noise diffusers divides by 0 (epsilon), or takes the root of -1e-16 (eta = 1; the test below).
    first = int(sigmas[0] == 1 and (prediction_type == "epsilon" or eta == 1))
    for index in range(first, num_steps):
        timestep = int(scheduler.timesteps[index])
        reference = {"eta": eta, "return_dict": False}
        mean = scheduler.step(output, timestep, z, variance_noise=torch.zeros_like(z), **reference)[0]
        following = scheduler.step(output, timestep, z, variance_noise=noise, **reference)[0]
        ours = our_step(z, output, sigmas, index, prediction_type, eta, noise=noise)
        after = rows(sigmas[index + 1])
        torch.testing.assert_close(from_flow(ours.mean, after).double(), mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(from_flow(ours.next, after).double(), following, rtol=1e-5, atol=1e-5)
        previous = timestep - 1000 // num_steps
        std = eta * scheduler._get_variance(timestep, previous).item() ** 0.5
        assert (ours.std_R / flow_scale(after))[0].item() == pytest.approx(std, rel=1e-5, abs=1e-9)


def test_from_pure_noise_the_ancestral_step_keeps_none_of_it():
    schedule = TimestepSchedule(**COGVIDEOX)
    sigmas, abar = schedule.sigmas(20), schedule.alphas_cumprod()[schedule.timesteps(20)[1]]
    assert sigmas[0] == 1
    x0 = -draw(1)  # of v-prediction where abar = 0
    ours = our_step(draw(0), draw(1), sigmas, 0, "v_prediction", 1.0, noise=draw(2))
    after = rows(sigmas[1])
    torch.testing.assert_close(from_flow(ours.mean, after).double(), abar.sqrt() * x0, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.std_R / flow_scale(after), rows((1 - abar).sqrt().float()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("eta", [0.3, 1.0])
@pytest.mark.parametrize("settings_", [SDXL, COGVIDEOX], ids=["sdxl", "cogvideox"])
def test_published_log_prob_is_that_of_ddpo_and_of_scipy(settings_, eta, reduction):
    """-(z' - mean)^2 / (2 std^2) - ln std - ln sqrt(2 pi), from diffusers' mean and variance, over the elements."""
    schedule = TimestepSchedule(**settings_)
    scheduler = ddim_scheduler(schedule, "v_prediction", 20)
    sigmas = schedule.sigmas(20)
    z, output, noise = draw(0), draw(1), draw(2)
    for index in range(int(sigmas[0] == 1 and eta == 1), 19):  # the last step has no noise; the first as above
        timestep = int(scheduler.timesteps[index])
        after = rows(sigmas[index + 1])
        ours = our_step(z, output, sigmas, index, "v_prediction", eta, noise=noise)
        taken = from_flow(ours.next.double(), after.double())
        mean = scheduler.step(output, timestep, z, eta=eta, variance_noise=torch.zeros_like(z), return_dict=False)[0]
        std = eta * math.sqrt(scheduler._get_variance(timestep, timestep - 50))
        ddpo = -((taken - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi))
        exact = torch.from_numpy(scipy.stats.norm.logpdf(taken.numpy(), mean.numpy(), std))
        torch.testing.assert_close(ddpo, exact)
        expected_R = ddpo.flatten(1).mean(1) if reduction == "mean" else ddpo.flatten(1).sum(1)
        kernel = DDIMStrategy(reduction=reduction)
        logp_R = kernel.log_prob(ours.next, our_transition(kernel, z, output, sigmas, index, eta))
        # atol: the float32 rounding of latents divided by stds down to 0.02.
        tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-5 if reduction == "mean" else 2e-5 * N}
        torch.testing.assert_close(published_log_prob(logp_R, after, N, reduction).double(), expected_R, **tolerance)


def our_transition(kernel: DDIMStrategy, z: Tensor, output: Tensor, sigmas: Tensor, index: int, eta: float) -> Any:
    sigma, sigma_next = rows(sigmas[index]), rows(sigmas[index + 1])
    x = to_flow(z.float(), sigma)
    v = flow_velocity(output.float(), x, sigma, "v_prediction")
    return kernel.transition(x, v, sigma, sigma_next, eta=eta, sigma_max=0.5)


def network(z: Tensor, timestep: Tensor) -> Tensor:
    """A model of z and an integer timestep, smooth and not linear."""
    time = (timestep.to(z) / 1000).view(-1, 1, 1, 1)
    return torch.tanh(z * (0.6 + time) + time.cos() * z.roll(1, dims=-1) - 0.3)


def velocity_of(schedule: TimestepSchedule, prediction_type: Any):
    def velocity(x: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        output = network(from_flow(x, sigma_R), schedule.timestep_of(sigma_R))
        return flow_velocity(output, x, sigma_R, prediction_type)

    return velocity


def test_a_whole_stochastic_trajectory_equals_diffusers_and_replays_at_ratio_one():
    schedule = TimestepSchedule(**SDXL)
    num_steps, eta = 10, 1.0
    scheduler = ddim_scheduler(schedule, "epsilon", num_steps)
    sigmas = schedule.sigmas(num_steps)
    noise = [draw(10 + index) for index in range(num_steps)]
    z = draw(0)
    stored = [z]
    for index, timestep in enumerate(scheduler.timesteps):
        output = network(z, timestep.expand(SHAPE[0]))
        z = scheduler.step(output, int(timestep), z, eta=eta, variance_noise=noise[index], return_dict=False)[0]
        stored.append(z)
    velocity = velocity_of(schedule, "epsilon")
    keywords: dict[str, Any] = {"strategy": DDIMStrategy(), "eta": eta}
    trajectory = sample(
        velocity,
        to_flow(draw(0).float(), rows(sigmas[0])),
        sigmas,
        sde_indices=range(num_steps - 1),
        step_noise=lambda step: noise[step].float(),
        **keywords,
    )
    # float32 against float64 over ten steps of a network with slope 1.6.
    for position, expected in zip(trajectory.indices, stored, strict=True):
        ours = from_flow(trajectory.at([position])[:, 0], rows(sigmas[position]))
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(trajectory.final.double(), stored[-1], rtol=1e-4, atol=1e-4)
    assert trajectory.sde_logp is not None
    x, following = trajectory.transitions()
    for slot, step in enumerate(trajectory.sde_indices):
        step_R = torch.full((SHAPE[0],), step)
        pair = (sigmas[step_R], sigmas[step_R + 1], step_R)
        again = replay(velocity, x[:, slot], following[:, slot], *pair, sigma_max=sigmas[1].item(), **keywords)
        assert torch.equal((again.logp_R - trajectory.sde_logp[:, slot]).exp(), torch.ones(SHAPE[0]))
    sample_R, step_R = transition_rows(SHAPE[0], trajectory.sde_indices)
    again = replay(
        velocity, x.flatten(0, 1), following.flatten(0, 1), sigmas[step_R], sigmas[step_R + 1], step_R,
        sigma_max=sigmas[1].item(), **keywords,
    )  # fmt: skip
    torch.testing.assert_close(again.logp_R, trajectory.sde_logp.flatten(), rtol=1e-6, atol=1e-6)


def test_deterministic_steps_equal_cogvideox_ddim():
    """The Euler steps of the loop; CogVideoX's own scheduler, with v-prediction, shifted and zero terminal SNR."""
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction", clip_sample=False, rescale_betas_zero_snr=True, timestep_spacing="trailing"
    )
    scheduler.set_timesteps(25)
    schedule = TimestepSchedule.from_scheduler_config(scheduler.config)
    sigmas = schedule.sigmas(25)
    assert sigmas[0] == 1
    z = draw(0).float()
    for timestep in scheduler.timesteps:
        z = scheduler.step(network(z, timestep.expand(SHAPE[0])), int(timestep), z, return_dict=False)[0]
    start = to_flow(draw(0).float(), rows(sigmas[0]))
    assert torch.equal(start, draw(0).float())
    ours = sample(velocity_of(schedule, "v_prediction"), start, sigmas).final
    # The scheduler computes in float64 from float32 latents; 25 steps.
    torch.testing.assert_close(ours.double(), z.double(), rtol=2e-5, atol=2e-5)


def test_deterministic_steps_equal_the_euler_scheduler_of_the_stock_sdxl_pipeline():
    """EulerDiscreteScheduler walks sqrt(1 - abar) / sqrt(abar) with another scale of its latents."""
    config = {
        **SDXL, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012,
        "prediction_type": "epsilon",
    }  # fmt: skip
    scheduler = diffusers.EulerDiscreteScheduler(**config)
    schedule = TimestepSchedule.from_scheduler_config({**config, "set_alpha_to_one": False}, set_alpha_to_one=True)
    for num_steps in (10, 30):
        scheduler.set_timesteps(num_steps)
        sigmas = schedule.sigmas(num_steps)
        x = draw(0).float() * scheduler.init_noise_sigma
        for timestep in scheduler.timesteps:
            output = network(scheduler.scale_model_input(x, timestep), timestep.expand(SHAPE[0]))
            x = scheduler.step(output, timestep, x, return_dict=False)[0]
        start = to_flow(draw(0).float(), rows(sigmas[0]))
        ours = sample(velocity_of(schedule, "epsilon"), start, sigmas).final
        # Euler's latents start with a standard deviation of 14, so its float32 is coarser.
        torch.testing.assert_close(ours, x, rtol=5e-5, atol=5e-5)


def test_gradient_of_the_published_log_prob_agrees_with_float64_finite_differences_of_diffusers():
    schedule, eta, index = TimestepSchedule(**SDXL), 0.8, 7
    scheduler = ddim_scheduler(schedule, "epsilon", 20)
    sigmas = schedule.sigmas(20)
    timestep, after = int(scheduler.timesteps[index]), rows(sigmas[index + 1])
    z, output = draw(0), draw(1)
    given = our_step(z, output, sigmas, index, "epsilon", eta, noise=draw(2)).next
    std = eta * math.sqrt(scheduler._get_variance(timestep, timestep - 50))

    def logp(perturbed: Tensor) -> float:
        taken = from_flow(given.double(), after.double())
        mean = scheduler.step(perturbed, timestep, z, eta=eta, variance_noise=torch.zeros_like(z), return_dict=False)[0]
        return scipy.stats.norm.logpdf(taken.numpy(), mean.numpy(), std).sum()

    leaf = output.float().requires_grad_()
    step = our_step(z, leaf, sigmas, index, "epsilon", eta, next_sample=given)
    published_log_prob(step.logp_R, after, N, "sum").sum().backward()
    assert leaf.grad is not None
    for element in (0, 31, 119):
        nudge = torch.zeros(z.numel(), dtype=torch.float64)
        nudge[element] = 1e-5
        nudge = nudge.view(SHAPE)
        difference = (logp(output + nudge) - logp(output - nudge)) / 2e-5
        # y - mean is a float32 difference of latents of about 1, over a std of about 0.2.
        assert leaf.grad.flatten()[element].item() == pytest.approx(difference, rel=1e-4, abs=1e-4)


def test_the_last_step_has_no_noise_and_is_refused_by_name():
    schedule = TimestepSchedule(**SDXL)
    keywords: dict[str, Any] = {"strategy": DDIMStrategy(), "eta": 1.0, "step_noise": lambda step: draw(step).float()}
    velocity = velocity_of(schedule, "epsilon")
    with pytest.raises(ValueError, match=r"ddim kernel adds no noise on the step to sigma = 0.*Leave step 3 out"):
        sample(velocity, draw(0).float(), schedule.sigmas(4), sde_indices=range(4), **keywords)
    # Where the schedule ends at the level of timestep 0, as DDPO's does, the last step is like the others.
    ending = TimestepSchedule(**SDXL, set_alpha_to_one=False)
    trajectory = sample(velocity, draw(0).float(), ending.sigmas(4), sde_indices=range(4), **keywords)
    assert trajectory.sde_logp is not None and torch.isfinite(trajectory.sde_logp).all()


levels = st.floats(0.02, 1.0)


@given(first=levels, second=levels, eta=st.floats(0.01, 1.0))
@settings(max_examples=100, deadline=None)
def test_transition_is_the_formula_of_the_paper_at_any_levels(first, second, eta):
    """Song et al., equations 12 and 16, in float64 from abar alone."""
    low, high = sorted((first, second))
    if high - low < 1e-3:
        return
    sigma, sigma_next = torch.tensor([high]), torch.tensor([low])
    abar, abar_next = (alphas_cumprod_of(each.double()).item() for each in (sigma, sigma_next))
    std = eta * math.sqrt((1 - abar_next) / (1 - abar) * (1 - abar / abar_next))
    x0, eps = 0.7, -1.3
    mean = math.sqrt(abar_next) * x0 + math.sqrt(max(1 - abar_next - std**2, 0)) * eps
    x = ((1 - sigma) * x0 + sigma * eps).view(1, 1)
    ours = DDIMStrategy().transition(x, torch.full((1, 1), eps - x0), sigma, sigma_next, eta=eta, sigma_max=0.9)
    assert (ours.std_R / flow_scale(sigma_next)).item() == pytest.approx(std, rel=1e-5)
    # The square root of what remains of the noise loses half the digits where nothing does (eta = 1, pure noise).
    assert from_flow(ours.mean, sigma_next).item() == pytest.approx(mean, abs=2e-6)


@given(sigma=st.floats(0, 1), value=st.floats(-3, 3), output=st.floats(-3, 3))
@settings(max_examples=100, deadline=None)
def test_coordinates_and_predictions_go_back_and_forth(sigma, value, output):
    sigma_R = torch.tensor([sigma], dtype=torch.float64)
    abar = alphas_cumprod_of(sigma_R)
    assert sigma_of(abar).item() == pytest.approx(sigma, abs=1e-7)
    x0, eps = torch.tensor([[value]]).double(), torch.tensor([[output]]).double()
    z = abar.sqrt() * x0 + (1 - abar).sqrt() * eps
    x = to_flow(z, sigma_R)
    torch.testing.assert_close(x, (1 - sigma) * x0 + sigma * eps)
    torch.testing.assert_close(from_flow(x, sigma_R), z)
    predicted: dict[PredictionType, Tensor] = {"v_prediction": abar.sqrt() * eps - (1 - abar).sqrt() * x0}
    predicted |= {"epsilon": eps} if sigma < 0.99 else {}
    predicted |= {"sample": x0} if sigma > 0.01 else {}
    for prediction_type, each in predicted.items():
        torch.testing.assert_close(flow_velocity(each, x, sigma_R, prediction_type), eps - x0, rtol=1e-9, atol=1e-9)


def test_an_unknown_prediction_is_named():
    with pytest.raises(ValueError, match="prediction_type = 'flow' is not one of"):
        flow_velocity(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), "flow")  # ty: ignore[invalid-argument-type]
