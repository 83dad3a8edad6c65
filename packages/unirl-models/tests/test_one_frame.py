"""Single frames through the VAE of Qwen-Image in 2-D."""

import copy
from typing import Any

import pytest
import torch

from unirl.models.qwen_image.one_frame import convolve_images_in_2d

from .families.qwen_image import tiny_vae


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = tiny_vae().eval().double()
    fast = copy.deepcopy(plain)
    convolve_images_in_2d(fast)
    return plain, fast


@pytest.mark.parametrize("frames", [1, 5])
def test_it_encodes_and_decodes_as_before(both: tuple[Any, Any], frames: int) -> None:
    """In float64, where only the order of sums differs."""
    plain, fast = both
    media = torch.rand(2, 3, frames, 32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        expected = plain.encode(media).latent_dist.mode()
        found = fast.encode(media).latent_dist.mode()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(fast.decode(found).sample, plain.decode(expected).sample, rtol=1e-9, atol=1e-10)


def test_images_take_2d_convolutions_alone(both: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = both

    def refuse(*args: object, **keywords: object) -> None:
        raise AssertionError("a 3-D convolution over one frame")

    monkeypatch.setattr(torch.nn.functional, "conv3d", refuse)
    convolutions = [module for module in fast.decoder.modules() if "forward" in vars(module)]
    assert len(convolutions) > 10
    with torch.no_grad():
        for convolution in convolutions:
            convolution(torch.rand(1, convolution.in_channels, 1, 8, 8, dtype=torch.float64))


def test_a_copy_convolves_with_its_own_weights(both: tuple[Any, Any]) -> None:
    _, fast = both
    other = copy.deepcopy(fast)
    latents = torch.rand(1, 4, 1, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
        assert not torch.allclose(other.decode(latents).sample, fast.decode(latents).sample)
