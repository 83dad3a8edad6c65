"""Differentiable preprocessing against transformers' processor on PIL."""

import pytest
import torch
import transformers

from unirl.reward.local.pixels import to_pictures
from unirl.reward.local.preprocess import CLIP_MEAN, CLIP_STD, CropPreprocessing, PadPreprocessing
from unirl.types.errors import ConfigError

SIZES = [(224, 224), (64, 64), (512, 512), (300, 180), (97, 260), (231, 224)]


def processor(edge=224, crop=224, **changes):
    size = {"height": crop, "width": crop}
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": edge}, crop_size=size, **changes)


def pictures(height, width):
    """Noise, the hardest case: neighbouring pixels differ by the whole range, so bicubic overshoots."""
    return torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(height))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("crop", [224, 160])
def test_it_equals_the_processor_within_one_and_a_half_bytes(size, crop):
    official = processor(crop=crop)
    pixels = (pictures(*size) * 255).round() / 255
    expected = official(images=to_pictures(pixels), return_tensors="pt")["pixel_values"]
    found = CropPreprocessing.of(official, "test")(pixels)
    assert found.shape == expected.shape == (2, 3, crop, crop)
    bytes_off = (found - expected).abs() * torch.tensor(CLIP_STD)[:, None, None] * 255
    assert bytes_off.max() < 1.5
    assert bytes_off.mean() < 0.35


def test_without_resizing_nothing_is_rounded():
    official = processor(edge=64, crop=64)
    pixels = (pictures(64, 64) * 255).round() / 255
    expected = official(images=to_pictures(pixels), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(CropPreprocessing.of(official, "test")(pixels), expected, rtol=0, atol=2e-6)


def test_the_gradient_of_an_inner_pixel_is_that_of_the_resize():
    """Doubling the size hands every pixel about four times, over the std of its channel."""
    pixels = torch.full((1, 3, 8, 8), 0.5, requires_grad=True)
    CropPreprocessing(shortest_edge=16, crop_hw=(16, 16))(pixels).sum().backward()
    assert pixels.grad is not None
    torch.testing.assert_close(pixels.grad[0, :, 4, 4], 4 / torch.tensor(CLIP_STD), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "changes",
    [{"resample": 2}, {"do_center_crop": False}, {"do_normalize": False}, {"crop": 300}],
)
def test_another_processor_is_refused_with_its_settings(changes):
    with pytest.raises(ConfigError, match="scorer x: its image processor is not CLIP's .*resample"):
        CropPreprocessing.of(processor(**changes), "scorer x")


def test_a_processor_of_a_fixed_size_is_refused():
    official = transformers.CLIPImageProcessorPil(size={"height": 224, "width": 224})
    with pytest.raises(ConfigError, match="its image processor is not CLIP's"):
        CropPreprocessing.of(official, "scorer x")


def test_padding_keeps_the_whole_picture_between_black_bars():
    pixels = torch.full((1, 3, 10, 40), 0.5)
    found = PadPreprocessing(16)(pixels)[0] * torch.tensor(CLIP_STD)[:, None, None]
    found = found + torch.tensor(CLIP_MEAN)[:, None, None]
    torch.testing.assert_close(found[:, 6:10], torch.full((3, 4, 16), 0.5))
    torch.testing.assert_close(found[:, :6], torch.zeros(3, 6, 16))
    torch.testing.assert_close(found[:, 10:], torch.zeros(3, 6, 16))
