"""What the table of families does not say of Qwen-Image-Edit: text bits, caching, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.models.adapter import require_condition
from unirl.models.embedding_cache import EmbeddingCache
from unirl.models.qwen_image_edit.adapter import sides_of
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError, DataError
from unirl.types.media import ImageLists, Texts

from .families.kit import families, ours, stock_of
from .families.qwen_image_edit import AREA, CONDITION_AREA, noise_picture, to_pil

ONE, TWO = noise_picture(64, 64), noise_picture(40, 90)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edit")


def loaded(name: str, folders: Path) -> Any:
    return ours(name, folders / name)


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_the_text_has_the_bits_of_the_stock_encoder(name: str, folders: Path) -> None:
    pipeline, stock = loaded(name, folders), stock_of(folders / name)
    pictures = [ONE] if name == "qwen_image_edit" else [ONE, TWO]
    area = AREA if name == "qwen_image_edit" else CONDITION_AREA
    params = families()[name].sampling(guidance_scale=1.0)
    request = {"text": Texts(texts=["make it red"]), "image": ImageLists(images=[pictures])}
    found = require_condition(pipeline.encode(request, params), "text", TextEmbedCondition)
    shown = [stock.image_processor.resize(to_pil(picture), *sides_of(picture, area)) for picture in pictures]
    with torch.no_grad():
        expected, _ = stock.encode_prompt("make it red", image=shown if len(shown) > 1 else shown[0])
    assert torch.equal(found.embeds, expected)


def test_samples_of_one_row_share_their_encodes(folders: Path) -> None:
    pipeline = loaded("qwen_image_edit", folders)
    calls = {"vae": 0, "text": 0}

    def counted(name: str, call: Any) -> Any:
        def run(*args: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return call(*args, **keywords)

        return run

    bundle = pipeline.bundle
    bundle.vae.encode = counted("vae", bundle.vae.encode)
    bundle.text.encoders["text_encoder"].model.forward = counted(
        "text", bundle.text.encoders["text_encoder"].model.forward
    )
    texts = ["make it red"] * 3 + ["make it blue"] * 3
    images = ImageLists(images=[[ONE], [ONE], [ONE.clone()], [ONE], [ONE], [ONE]])
    params = families()["qwen_image_edit"].sampling(guidance_scale=1.0)
    for _ in range(2):
        conditions = pipeline.encode({"text": Texts(texts=texts), "image": images}, params)
    # Both instructions have one image and, in bytes, other lengths: a call each.
    assert calls == {"vae": 1, "text": 2}
    assert all(condition.batch_size == 6 for condition in conditions.values())


def test_what_it_cannot_read_is_named(folders: Path) -> None:
    pipeline = loaded("qwen_image_edit", folders)
    sampling = families()["qwen_image_edit"].sampling
    text = Texts(texts=["make it red"])

    def encode(*pictures: torch.Tensor, **changes: Any) -> Any:
        return pipeline.encode({"text": text, "image": ImageLists(images=[list(pictures)])}, sampling(**changes))

    with pytest.raises(
        ConfigError, match="Qwen-Image-Edit needs images in the slot 'image' of a request, which has none"
    ):
        pipeline.encode({"text": text}, sampling())
    with pytest.raises(ConfigError, match="takes 1 images per sample; sample 0 brings 2"):
        encode(ONE, TWO)
    with pytest.raises(ConfigError, match="takes 1 images per sample; sample 0 brings 0"):
        encode()
    with pytest.raises(DataError, match="an image of 400 x 2 pixels is too narrow"):
        encode(torch.zeros(3, 2, 400))
    with pytest.raises(ConfigError, match="max_sequence_length"):
        encode(ONE, max_sequence_length=64)
    with pytest.raises(ConfigError, match="mask"):
        pipeline.encode(
            {"text": text, "image": ImageLists(images=[[ONE]]), "mask": ImageLists(images=[[ONE]])}, sampling()
        )


def test_a_dropped_encoder_is_named_for_new_pictures_alone(folders: Path) -> None:
    pipeline = loaded("qwen_image_edit", folders)
    params = families()["qwen_image_edit"].sampling(guidance_scale=1.0)
    request = {"text": Texts(texts=["make it red"]), "image": ImageLists(images=[[ONE]])}
    before = pipeline.encode_texts(request, params)["text"].embeds
    pipeline.drop_text_encoders()
    assert torch.equal(pipeline.encode(request, params)["text"].embeds, before)
    with pytest.raises(ConfigError, match="the text encoders were dropped"):
        pipeline.encode({**request, "image": ImageLists(images=[[TWO]])}, params)


def test_encoders_are_kept_where_the_cache_has_lost_what_they_made(folders: Path) -> None:
    bundle = loaded("qwen_image_edit", folders).bundle
    pipeline: Any = families()["qwen_image_edit"].pipeline(
        bundle, FlowSDEStrategy(), embedding_cache=EmbeddingCache(memory_bytes=1)
    )
    params = families()["qwen_image_edit"].sampling(guidance_scale=1.0)
    pipeline.encode_texts({"text": Texts(texts=["make it red"]), "image": ImageLists(images=[[ONE]])}, params)
    with pytest.raises(
        ConfigError, match=r"1 embeddings did not fit into the .* Set pipeline.embedding_cache to a folder"
    ):
        pipeline.drop_text_encoders()
    assert not bundle.text.is_dropped
