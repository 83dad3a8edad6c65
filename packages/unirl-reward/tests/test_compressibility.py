"""JPEG size, against PIL used by hand."""

from io import BytesIO

import pytest
import torch
from PIL import Image

from unirl.reward.local.images.compressibility import JPEGCompressibilityScorer, JPEGIncompressibilityScorer
from unirl.reward.local.pixels import to_bytes
from unirl.types.errors import ContractError


def test_size_is_that_of_the_jpeg_of_quality_95_in_kilobytes(make_request):
    request = make_request(num_samples=2, size=32)
    expected = []
    for pixels in request.pixels:
        buffer = BytesIO()
        picture = Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy())
        picture.save(buffer, "JPEG", quality=95)
        expected.append(len(buffer.getvalue()) / 1000)
    sizes = JPEGIncompressibilityScorer().score(request).rewards
    torch.testing.assert_close(sizes, torch.tensor(expected), rtol=0, atol=0)
    assert torch.equal(JPEGCompressibilityScorer().score(request).rewards, -sizes)


def test_noise_is_larger_than_a_flat_picture(make_request):
    pixels = torch.stack([torch.full((3, 32, 32), 0.5), torch.rand(3, 32, 32)])
    flat, noise = JPEGIncompressibilityScorer().score(make_request(num_samples=2, pixels=pixels)).rewards
    assert flat < noise


def test_bytes_round_to_the_nearest_and_low_precision_is_accepted():
    pixels = torch.tensor([0.0, 0.499 / 255, 0.501 / 255, 1.0]).repeat(3, 1).view(1, 3, 1, 4)
    assert to_bytes(pixels)[0, 0, :, 0].tolist() == [0, 0, 1, 255]
    assert to_bytes(pixels.bfloat16())[0, 0, :, 0].tolist() == [0, 0, 1, 255]
    assert to_bytes(pixels + 0.005)[0, 0, 3, 0] == 255


@pytest.mark.parametrize(
    ("pixels", "text"),
    [
        (torch.rand(1, 3, 4, 4) * 2 - 1, r"pixels must lie in \[0, 1\]"),
        (torch.randint(0, 255, (1, 3, 4, 4)), r"float \[b, 3, H, W\], got torch.int64"),
        (torch.rand(1, 1, 4, 4), r"got torch.float32 \(1, 1, 4, 4\)"),
        (torch.full((1, 3, 4, 4), torch.nan), "got nan to nan"),
    ],
)
def test_other_pixels_are_refused_rather_than_clipped(pixels, text):
    with pytest.raises(ContractError, match=text):
        to_bytes(pixels)
