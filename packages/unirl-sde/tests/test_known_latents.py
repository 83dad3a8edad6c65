"""Latents that a request gives are reached by their velocity, under any kernel."""

from __future__ import annotations

import pytest
import torch

from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.known_latents import keeping, towards
from unirl.sde.loop import sample

SIGMAS = torch.tensor([1.0, 0.8, 0.55, 0.3, 0.1, 0.0])


def _parts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise and known latents [2, 3, 4, 4], and where new ones are made."""
    generator = torch.Generator().manual_seed(0)
    noise, known = (torch.randn(2, 3, 4, 4, generator=generator) for _ in range(2))
    return noise, known, torch.rand(2, 1, 4, 4, generator=generator) > 0.5


def test_a_deterministic_walk_is_the_image_with_the_noise_of_each_level() -> None:
    noise, known, is_new = _parts()
    velocity = keeping(lambda x, sigma, step: -x, known, is_new)
    walked = sample(velocity, noise, SIGMAS, keep="all")
    for position, sigma in enumerate(SIGMAS):
        expected = (1 - sigma) * known + sigma * noise
        error = (walked.latents[:, position] - expected).abs()[~is_new.expand_as(noise)]
        assert float(error.max()) < 1e-6  # float32, five steps
    free = sample(lambda x, sigma, step: -x, noise, SIGMAS, keep="all")
    assert torch.equal(walked.final[is_new.expand_as(noise)], free.final[is_new.expand_as(noise)])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_stochastic_walk_ends_on_the_image(seed: int) -> None:
    noise, known, is_new = _parts()
    generator = torch.Generator().manual_seed(seed)
    walked = sample(
        lambda x, sigma, step: towards(known, x, sigma),
        noise,
        SIGMAS,
        strategy=FlowSDEStrategy(),
        eta=0.7,
        sde_indices=[0, 1, 2, 3],
        step_noise=lambda step: torch.randn(noise.shape, generator=generator),
    )
    torch.testing.assert_close(walked.final, known, rtol=0, atol=1e-5)
