"""Next latents noised further: a case worked by hand, what such a latent must be, and the targets from scores."""

import pytest
import torch
from torch import Tensor

from unirl.algorithms.trajectory_matching import (
    SMALLEST_RISE,
    StepLevels,
    clean_target,
    latent_target,
    next_latent,
    raised,
)
from unirl.algorithms.trajectory_surrogate import drawn_steps
from unirl.sde.forward import interpolate, predict_noise, predict_x0, velocity_target


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(seed: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_latent_worked_by_hand():
    """From x_n = 4 at .8 with the clean latent 2: velocity 2.5, at .4 the latent is 3 = .6 * 2 + .4 * 4.5. Noised to .6
    it keeps .4 / .6 of itself, so 2, and of the noise sqrt(.36 - (.4 * .4 / .6)^2) = sqrt(.36 - 16 / 225) = .5375."""
    at = StepLevels(numbers(0.8), numbers(0.4))
    x = numbers(2.0).view(1, 1)
    x_m = next_latent(numbers(4.0).view(1, 1), x, at)
    assert float(x_m) == pytest.approx(3.0, abs=1e-12)
    x_s = raised(x_m, numbers(-1.0).view(1, 1), at.after, numbers(0.6))
    b = (65 / 225) ** 0.5
    assert float(x_s) == pytest.approx(2 - b, abs=1e-12)
    assert float(clean_target(x_s, x, numbers(0.6))) == pytest.approx(-b / 0.6, abs=1e-12)
    # - x_m / .6 - (.6 + .16 * (2 / 3) / .6) / b
    target = latent_target(x_m, numbers(-1.0).view(1, 1), at.after, numbers(0.6))
    assert float(target) == pytest.approx(-5 - (0.6 + 0.16 * 2 / 3 / 0.6) / b, abs=1e-12)


def test_the_next_latent_is_eulers_and_has_the_noise_that_its_velocity_says():
    before, after, velocity, x_n = (
        numbers(0.9, 0.9, 0.5, 1.0, 0.3),
        numbers(0.5, 0.0, 0.2, 0.7, 0.1),
        drawn(0),
        drawn(1),
    )
    x = predict_x0(x_n, velocity, before)
    x_m = next_latent(x_n, x, StepLevels(before, after))
    torch.testing.assert_close(x_m, x_n - (before - after).view(-1, 1, 1) * velocity, rtol=0, atol=1e-12)
    torch.testing.assert_close(x_m, interpolate(x, predict_noise(x_n, velocity, before), after), rtol=0, atol=1e-12)


def test_a_raised_latent_has_the_marginal_of_its_level():
    """Mean (1 - s) x and, over the noise of the latent and the new one, variance s^2."""
    after, level = numbers(0.0, 0.2, 0.5, 0.7, 0.9), numbers(0.4, 0.3, 0.98, 0.75, 0.95)
    x, zeros, ones = drawn(2), torch.zeros(5, 2, 3).double(), torch.ones(5, 2, 3).double()
    mean = raised(interpolate(x, zeros, after), zeros, after, level)
    torch.testing.assert_close(mean, interpolate(x, zeros, level), rtol=0, atol=1e-12)
    parts = [raised(interpolate(zeros, ones, after), zeros, after, level), raised(zeros, ones, after, level)]
    total = sum(part.square() for part in parts)
    torch.testing.assert_close(total, level.square().view(-1, 1, 1).expand_as(x), rtol=0, atol=1e-12)


def test_after_the_last_step_all_is_the_forward_process():
    x, noise, level = drawn(3), drawn(4), numbers(0.1, 0.3, 0.5, 0.7, 0.98)
    nothing = torch.zeros(5, dtype=torch.float64)
    x_s = raised(x, noise, nothing, level)
    torch.testing.assert_close(x_s, interpolate(x, noise, level), rtol=0, atol=1e-12)
    for target in (clean_target(x_s, x, level), latent_target(x, noise, nothing, level)):
        torch.testing.assert_close(target, velocity_target(x, noise), rtol=0, atol=1e-12)


def test_the_target_of_a_latent_is_the_velocity_of_its_score_by_autograd():
    """The clean latent that a score implies is (x_s + s^2 score) / (1 - s), by Tweedie's formula."""
    after, level = numbers(0.0, 0.2, 0.5, 0.7, 0.9), numbers(0.4, 0.3, 0.98, 0.75, 0.95)
    x_m, noise = drawn(5), drawn(6)
    x_s = raised(x_m, noise, after, level).requires_grad_()
    kept = (1 - level) / (1 - after)
    variance = level.square() - (kept * after).square()
    log_density = -(x_s - kept.view(-1, 1, 1) * x_m).square() / (2 * variance.view(-1, 1, 1))
    (score,) = torch.autograd.grad(log_density.sum(), x_s)
    s = level.view(-1, 1, 1)
    clean = (x_s.detach() + s.square() * score) / (1 - s)
    expected = (x_s.detach() - clean) / s
    torch.testing.assert_close(latent_target(x_m, noise, after, level), expected, rtol=1e-9, atol=1e-9)


def test_the_target_of_a_latent_is_that_of_the_clean_one_in_expectation():
    """For one clean latent x, over the noise of the latent: the velocity at x_s is that towards x. 1e6 draws, so the
    mean of a product has a standard error of about .003."""
    generator = torch.Generator().manual_seed(7)
    own, new = (torch.randn(10**6, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    x, after, level = 0.7, numbers(0.5).expand(10**6), numbers(0.8).expand(10**6)
    x_m = interpolate(torch.full_like(own, x), own, after)
    x_s = raised(x_m, new, after, level)
    gap = latent_target(x_m, new, after, level) - clean_target(x_s, torch.full_like(own, x), level)
    for feature in (torch.ones_like(x_s), x_s, x_s.square()):
        assert float((gap * feature).mean()) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("levels", ["step", "above"])
def test_levels_lie_above_the_latents_and_within_what_is_asked(levels):
    at = StepLevels(torch.tensor([1.0, 0.9, 0.5, 0.04]), torch.tensor([0.9, 0.5, 0.04, 0.0]))
    ends = [at.drawn(torch.full((4,), draw), 0.1, 0.95, levels=levels) for draw in (0.0, 1.0)]
    torch.testing.assert_close(ends[0], torch.tensor([0.92, 0.52, 0.1, 0.04 if levels == "step" else 0.1]))
    torch.testing.assert_close(ends[1], torch.tensor([0.95, 0.9, 0.5, 0.04] if levels == "step" else [0.95] * 4))


def test_a_step_that_ends_above_what_is_asked_has_the_level_next_to_it():
    at = StepLevels(torch.tensor([1.0, 1.0]), torch.tensor([0.97, 0.99]))
    for levels in ("step", "above"):
        found = at.drawn(torch.tensor([0.3, 0.3]), 0.02, 0.98, levels=levels)
        torch.testing.assert_close(found, torch.tensor([0.985, 0.995]))
    assert SMALLEST_RISE == 0.02


def test_later_steps_are_drawn_in_proportion_to_their_number():
    draws = (torch.arange(6000, dtype=torch.float64) + 0.5) / 6000
    assert drawn_steps(draws, 3).bincount().tolist() == [1000, 2000, 3000]
    assert drawn_steps(torch.tensor([0.0, 0.999999]), 2).tolist() == [0, 1]
