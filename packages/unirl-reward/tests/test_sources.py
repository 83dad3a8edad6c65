from __future__ import annotations

import pytest
import torch

from unirl.reward.local.judges.judge import sources_of
from unirl.reward.wire.samples import samples_of
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import ImageLists, Images, Texts
from unirl.types.reward import RewardRequest

PICTURES = (torch.arange(2 * 3 * 4 * 4) / 95).reshape(2, 3, 4, 4)


def request(lists: list[list[torch.Tensor]]) -> RewardRequest:
    return RewardRequest(
        sample_ids=["a", "b"],
        primitives={"text": Texts(texts=["x", "y"]), "image": ImageLists(images=lists)},
        generated={"image": Images(pixels=PICTURES)},
    )


def test_images_of_data_rows_and_batches_of_images_are_the_same_sources() -> None:
    listed = request([[PICTURES[0]], [PICTURES[1]]])
    batched = listed.replace(primitives={**listed.primitives, "image": Images(pixels=PICTURES)})
    for one, other in zip(listed.sources, batched.sources, strict=True):
        assert torch.equal(one[0], other[0])
    assert [p.tobytes() for p in sources_of(listed, "s")] == [p.tobytes() for p in sources_of(batched, "s")]
    for one, other in zip(samples_of(listed), samples_of(batched), strict=True):
        assert one.source is not None and other.source is not None
        assert (one.source == other.source).all()


def test_several_images_a_sample_are_refused_where_one_is_compared_with() -> None:
    several = request([[PICTURES[0]], [PICTURES[1], PICTURES[0]]])
    with pytest.raises(ConfigError, match=r"scorer s compares an edit with the one image .* bring \[1, 2\] images"):
        sources_of(several, "s")
    with pytest.raises(ContractError, match=r"one input image per sample can be sent .* have \[1, 2\]"):
        samples_of(several)


def test_a_request_without_images_is_named() -> None:
    bare = request([[PICTURES[0]], [PICTURES[1]]]).replace(primitives={"text": Texts(texts=["x", "y"])})
    with pytest.raises(ConfigError, match=r"has the inputs \['text'\]. Give the data rows per image"):
        _ = bare.sources
