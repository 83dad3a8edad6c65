"""Reference images of a request, and rows of different shapes in one velocity."""

from pathlib import Path

import pytest
import torch
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from torch import Tensor

from unirl.models.diffusers_pipeline.references import cropped, packed_references, pictures_of, resized, stacked
from unirl.models.flux2.adapter import LARGEST_AREA, fitted
from unirl.models.ragged_rows import in_groups
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.errors import ConfigError, DataError
from unirl.types.media import ImageLists, Images, Texts

from .families.kit import families
from .families.tiny_parts import rounded, to_pil


def test_rows_of_equal_keys_are_one_forward_and_come_back_in_order() -> None:
    called: list[list[int]] = []
    x = torch.arange(5.0, requires_grad=True)

    def forward(rows: list[int]) -> Tensor:
        called.append(rows)
        return x[rows] ** 2

    out = in_groups(["a", "b", "a", "c", "b"], forward)
    assert called == [[0, 2], [1, 4], [3]]
    assert out.tolist() == [0.0, 1.0, 4.0, 9.0, 16.0]
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_a_rank_with_fewer_groups_takes_as_many_forwards_as_the_others() -> None:
    asked: list[bool] = []
    called: list[list[int]] = []

    def any_rank(value: bool) -> bool:
        """Stands for two ranks, the other of which has three groups."""
        asked.append(value)
        return value or len(asked) <= 3

    def forward(rows: list[int]) -> Tensor:
        called.append(rows)
        return torch.ones(len(rows))

    assert in_groups([1, 1], forward, any_rank).tolist() == [1.0, 1.0]
    assert called == [[0, 1], [0], [0]] and asked == [True, False, False, False]


def test_references_are_packed_by_sample() -> None:
    samples = [[torch.randn(2, 4, 6)], [], [torch.randn(2, 2, 2), torch.randn(2, 4, 2)]]
    found = packed_references(samples, 2, torch.device("cpu"))
    assert found.grids == [((1, 2, 3),), (), ((1, 1, 1), (1, 2, 1))]
    assert found.lengths.tolist() == [6, 0, 3] and found.patches.shape == (9, 8)
    assert stacked(found, [2]).shape == (1, 3, 8) and stacked(found, [1]).shape == (1, 0, 8)


@pytest.mark.parametrize("size", [(1500, 1100), (300, 1200), (65, 70)])
def test_a_reference_of_flux2_is_made_fit_as_the_stock_pipeline_does(size: tuple[int, int]) -> None:
    picture = rounded(torch.rand(3, *size, generator=torch.Generator().manual_seed(0)))
    image, processor = to_pil(picture), Flux2ImageProcessor(vae_scale_factor=16)
    if image.width * image.height > LARGEST_AREA:
        image = processor._resize_to_target_area(image, LARGEST_AREA)
    width, height = (side // 16 * 16 for side in image.size)
    expected = processor.preprocess(image, height=height, width=width, resize_mode="crop")[0]
    torch.testing.assert_close(fitted(picture, 16) * 2 - 1, expected, rtol=0, atol=1e-6)


def test_a_picture_of_the_right_size_is_not_touched() -> None:
    picture = torch.rand(3, 32, 48)
    assert resized(picture, 32, 48) is picture
    assert torch.equal(cropped(picture, 16), picture)
    with pytest.raises(DataError, match=r"\(12, 48\) pixels; each side needs at least 16"):
        cropped(picture[:, :12], 16)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({}, "needs images in the slot 'image' of a request, which has none"),
        ({"image": Texts(texts=["a"])}, "which holds Texts"),
        (
            {"image": ImageLists(images=[[torch.rand(3, 8, 8)], []])},
            "takes 1 to 2 images .* sample 1 brings 0",
        ),
        ({"image": ImageLists(images=[[torch.rand(3, 8, 8)] * 3])}, "sample 0 brings 3"),
    ],
)
def test_a_wrong_number_of_references_is_named(media: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pictures_of(media, "Edit", fewest=1, most=2)


def test_pictures_of_another_kind_are_refused() -> None:
    with pytest.raises(DataError, match=r"\(4, 8, 8\); Edit needs \[3, H, W\]"):
        pictures_of({"image": Images(pixels=torch.rand(1, 4, 8, 8))}, "Edit", fewest=1, most=1)


def test_equal_references_are_encoded_once(tmp_path: Path) -> None:
    family = families()["flux2_klein_edit"]
    family.tiny().save_pretrained(tmp_path / "klein")
    bundle = family.bundle(str(tmp_path / "klein"))
    pipeline, vae = family.pipeline(bundle, FlowSDEStrategy()), bundle.vae
    num_encoded: list[int] = []
    encode = vae.encode
    vae.encode = lambda pixels: num_encoded.append(len(pixels)) or encode(pixels)
    one, other = torch.rand(3, 64, 64), torch.rand(3, 64, 64)
    request = {"text": Texts(texts=["a"] * 16), "image": ImageLists(images=[[one]] * 8 + [[one, other]] * 8)}
    params = family.sampling(guidance_scale=1.0)
    first = pipeline.encode(request, params)["reference"]
    again = pipeline.encode(request, params)["reference"]
    assert num_encoded == [1, 1]
    assert first.equals(again)
