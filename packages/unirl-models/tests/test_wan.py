"""What only Wan has: text cleaning, experts, given frames, and the messages of wrong checkpoints and requests."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from unirl.models.experts import routed
from unirl.models.tiny.wan import CLIP_TOKENS
from unirl.models.wan.adapter import WanAdapter
from unirl.models.wan.bundle import WanBundle, WanImageBundle
from unirl.models.wan.image_adapter import WanImageAdapter
from unirl.models.wan.text import cleaned
from unirl.types.batch import same_value
from unirl.types.conditions import ImageEmbedCondition, ImageLatentCondition, TextEmbedCondition
from unirl.types.errors import ConfigError, DataError
from unirl.types.media import ImageLists, Primitive, Texts, Videos

from .families.kit import Request, families, load, ours, pinned, relative
from .families.wan import animated, call_vace, clips, first_and_last_frames, first_frames

FOUR = ["a red cat", "fog", "a red cat", "fog"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wan")


def adapter_of(name: str, folders: Path) -> tuple[Any, Any]:
    """The adapter of a family of the table and its sampling."""
    return ours(name, folders / name).adapter, families()[name].sampling()


def edited_index(name: str, folders: Path, target: Path, **changes: Any) -> Path:
    """A family's folder with another index; its components are the same files."""
    source = folders / name
    ours(name, source)
    target.mkdir()
    for component in source.iterdir():
        if component.is_dir():
            (target / component.name).symlink_to(component)
    index = json.loads((source / "model_index.json").read_text()) | changes
    (target / "model_index.json").write_text(json.dumps(index))
    return target


def test_a_prompt_is_cleaned_as_published() -> None:
    assert cleaned("  a\tcat &amp;amp; \n dog  ") == "a cat & dog"
    assert cleaned("caf\u00c3\u00a9") == "caf\u00e9"  # read as Latin-1 what was UTF-8


def test_a_text_embedding_is_encode_prompts_bit_for_bit(folders: Path) -> None:
    adapter, params = adapter_of("wan21_t2v", folders)
    stock: Any = diffusers.WanPipeline.from_pretrained(folders / "wan21_t2v")
    with torch.no_grad():
        expected, _ = stock.encode_prompt(FOUR[:2], do_classifier_free_guidance=False, max_sequence_length=32)
    conditions = adapter.encode({"text": Texts(texts=FOUR[:2])}, params)
    assert torch.equal(adapter.padded_text(conditions, params), expected)


def test_the_experts_see_their_own_rows_and_a_wrong_row_changes_nothing(folders: Path) -> None:
    adapter, params = adapter_of("wan22_t2v", folders)
    conditions = adapter.encode({"text": Texts(texts=FOUR)}, params)
    x = torch.randn(4, *adapter.latent_shape(params), generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([1.0, 0.875, 0.874, 0.2])  # the boundary itself belongs to the first
    velocity = adapter.predict(x, sigma, {"text": conditions["text"]}, params)
    for name, rows in (("transformer", [0, 1]), ("transformer_2", [2, 3])):
        text = {"text": conditions["text"].select(rows)}
        torch.testing.assert_close(velocity[rows], adapter.predict_by(name, x[rows], sigma[rows], text, params))
    velocity[:2].square().sum().backward()
    first, second = adapter.bundle.trainable_modules().values()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in second.parameters())
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in first.parameters())


def test_every_rank_is_asked_about_an_expert_before_it_runs() -> None:
    """A rank that ran first would gather shards while the others wait to be asked."""
    events: list[str] = []

    def expert(name: str, rows: list[int], x: Tensor, sigma: Tensor, step: Tensor) -> Tensor:
        events.append(f"{name} {rows}")
        return x

    def any_rank(is_mine: bool) -> bool:
        events.append(f"asked {is_mine}")
        return True  # another rank has rows for it

    velocity = routed([partial(expert, "high"), partial(expert, "low")], lambda sigma: (sigma < 0.5).long(), any_rank)
    x = torch.ones(2, 1)
    assert torch.equal(velocity(x, torch.tensor([1.0, 0.9]), torch.zeros(2)), x)
    assert events == ["asked True", "high [0, 1]", "asked False", "low [0]"]


def test_the_second_scale_is_the_first_where_none_is_given(folders: Path) -> None:
    adapter, params = adapter_of("wan22_t2v", folders)
    assert adapter.guidance(params).scale_below == 2.0 and adapter.guidance(params).boundary == 0.875
    assert adapter.guidance(dataclasses.replace(params, guidance_scale_2=None)).scale_below is None


def test_trajectories_of_ti2v_end_on_the_given_frame(folders: Path) -> None:
    """Stochastic ones too: at the last step the mean is the frame, and its noise is none."""
    pipeline = ours("wan22_ti2v_image", folders / "wan22_ti2v_image")
    params = families()["wan22_ti2v_image"].sampling(sde_indices=[0, 1, 2, 3])
    inputs = first_frames(2)
    with pipeline.evaluating():
        conditions = pipeline.encode({"text": Texts(texts=FOUR[:2]), **inputs}, params)
        noise = torch.randn(2, *pipeline.latent_shape(params), generator=torch.Generator().manual_seed(0))
        segment = pipeline.diffuse(conditions, noise, pipeline.sigmas(params), params, noise_keys=["a", "b"])
    given = conditions["image"]
    assert isinstance(given, ImageLatentCondition)
    torch.testing.assert_close(segment.clean_latents[:, :, :1], given.latents, rtol=1e-5, atol=1e-5)


def test_equal_images_are_encoded_once_and_rows_keep_their_own(folders: Path) -> None:
    """Eight samples of two prompts with two images each: two encodings of latents, two of features, three of text."""
    bundle: Any = ours("wan21_i2v", folders / "wan21_i2v").adapter.bundle
    adapter = WanImageAdapter(bundle)
    params = families()["wan21_i2v"].sampling()
    inputs = {name: value.repeat_interleave(4) for name, value in first_frames(2).items()}
    conditions = adapter.encode({"text": Texts(texts=[t for t in FOUR[:2] for _ in range(4)]), **inputs}, params)
    assert adapter.embedding_cache.statistics.num_misses == 2 + 2 + 3
    latents, features = conditions["image"], conditions["image_embeds"]
    assert isinstance(latents, ImageLatentCondition) and isinstance(features, ImageEmbedCondition)
    assert latents.latents.shape == (8, 4 + 4, 2, 4, 4) and features.embeds.shape == (8, CLIP_TOKENS, 8)
    assert torch.equal(latents.latents[0], latents.latents[3]) and not torch.equal(
        latents.latents[3], latents.latents[4]
    )
    adapter.encode({"text": Texts(texts=FOUR[:2]), **first_frames(2)}, params)
    assert adapter.embedding_cache.statistics.num_misses == 2 + 2 + 3
    other = dataclasses.replace(params, num_frames=9)
    adapter.encode({"text": Texts(texts=FOUR[:2]), **first_frames(2)}, other)
    assert adapter.embedding_cache.statistics.num_misses == 2 + 2 + 3 + 2  # features do not depend on the size


def test_the_mask_says_which_frames_are_given(folders: Path) -> None:
    adapter, params = adapter_of("wan22_i2v", folders)
    for inputs, last in ((first_frames(1), [0, 0, 0, 0]), (first_and_last_frames(1), [0, 0, 0, 1])):
        given = adapter.encode({"text": Texts(texts=FOUR[:1]), **inputs}, params)["image"]
        assert isinstance(given, ImageLatentCondition)
        mask = given.latents[0, :4, :, 0, 0]
        assert mask[:, 0].tolist() == [1, 1, 1, 1] and mask[:, 1].tolist() == last


def three_images(num_samples: int) -> dict[str, Primitive]:
    return {"image": ImageLists(images=[[torch.rand(3, 8, 8)] * 3] * num_samples)}


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("wan21_i2v", lambda n: {}, "needs images in the slot 'image' of a request, which has none"),
        ("wan21_i2v", first_and_last_frames, "takes 1 images per sample; sample 0 brings 2"),
        ("wan21_first_last_frame", first_frames, "takes 2 images per sample; sample 0 brings 1"),
        ("wan22_i2v", three_images, "takes 1 to 2 images per sample; sample 0 brings 3"),
        ("wan21_t2v", first_frames, r"reads \['text'\] of a request, which also brings"),
    ],
)
def test_a_request_with_other_images_is_refused(name: str, inputs: Any, message: str, folders: Path) -> None:
    adapter, params = adapter_of(name, folders)
    with pytest.raises(ConfigError, match=message):
        adapter.encode({"text": Texts(texts=["a"]), **inputs(1)}, params)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wan21_t2v", {"num_frames": 6}, r"num_frames = 6 is not 4 k \+ 1.*Use num_frames = 5 or 9"),
        ("wan21_t2v", {"height": 40}, "height = 40"),
        ("wan22_ti2v", {"width": 48}, "width = 48"),
        ("wan21_t2v", {"guidance_scale_2": 2.0}, "guidance_scale_2 = 2.0 is for a second expert"),
        ("wan22_t2v", {"guidance_scale": 1.0}, "guidance_scale_2 = 2.0 guides nothing"),
        ("wan21_t2v", {"max_sequence_length": 513}, r"max_sequence_length = 513 must lie in 1\.\.512"),
        ("wan21_i2v", {"max_sequence_length": 64}, "max_sequence_length = 64: the transformer of .* needs 512"),
    ],
)
def test_sampling_that_does_not_fit_is_refused(name: str, changes: Any, message: str, folders: Path) -> None:
    adapter, params = adapter_of(name, folders)
    with pytest.raises(ConfigError, match=message):
        adapter.latent_shape(dataclasses.replace(params, **changes))


@pytest.mark.parametrize(
    ("name", "bundle", "changes", "message"),
    [
        ("wan22_t2v", WanBundle, {"boundary_ratio": 1.5}, r"boundary_ratio = 1.5 of .* must lie in \(0, 1\)"),
        ("wan22_t2v", WanBundle, {"boundary_ratio": None}, "has a transformer_2 and boundary_ratio = None"),
        ("wan21_t2v", WanBundle, {"boundary_ratio": 0.5}, "has no transformer_2 and boundary_ratio = 0.5"),
        ("wan21_t2v", WanImageBundle, {}, "makes videos of text alone: its transformer reads 4 channels"),
        ("wan21_i2v", WanBundle, {}, "holds a WanImageToVideoPipeline; this model needs a WanPipeline"),
        ("wan21_i2v", WanImageBundle, {"image_encoder": [None, None]}, "has no image_encoder and image_processor"),
    ],
)
def test_a_wrong_checkpoint_is_refused_before_weights_are_read(
    name: str, bundle: Any, changes: Any, message: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edited_index(name, folders, tmp_path / "edited", **changes)
    monkeypatch.setattr(WanBundle, "load", lambda *args, **kwargs: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=message):
        bundle(str(folder))


def test_a_boundary_of_ones_own_is_used_and_bounded(folders: Path) -> None:
    ours("wan22_t2v", folders / "wan22_t2v")
    bundle = WanBundle(str(folders / "wan22_t2v"), boundary_ratio=0.5)
    assert WanAdapter(bundle).bundle.boundary == 0.5
    with pytest.raises(ConfigError, match=r"bundle.boundary_ratio = 0 must lie in \(0, 1\)"):
        WanBundle(str(folders / "wan22_t2v"), boundary_ratio=0)


def test_ti2v_opens_as_a_model_of_text_and_as_one_of_images(folders: Path) -> None:
    """The released folder names WanPipeline; the same weights begin with an image where WanImageBundle opens them."""
    ours("wan22_ti2v", folders / "wan22_ti2v")
    bundle = WanImageBundle(str(folders / "wan22_ti2v"))
    assert bundle.num_images == (1, 1) and WanImageAdapter(bundle).fps == 24.0


def test_text_is_padded_alike_whatever_the_batch_holds(folders: Path) -> None:
    adapter, params = adapter_of("wan21_t2v", folders)
    both = adapter.encode({"text": Texts(texts=FOUR[:2])}, params)
    text = both["text"]
    assert isinstance(text, TextEmbedCondition) and text.embeds.shape[1] == len(FOUR[0])  # one byte per token
    alone = adapter.encode({"text": Texts(texts=FOUR[1:2])}, params)
    assert torch.equal(adapter.padded_text(both, params)[1], adapter.padded_text(alone, params)[0])


@pytest.mark.parametrize("size", [(5, 32, 32), (9, 32, 48)])
@pytest.mark.parametrize("num_references", [0, 2])
def test_vace_with_a_video_a_mask_and_references_is_the_stock_pipeline(
    size: tuple[int, int, int], num_references: int, folders: Path
) -> None:
    """Half of each frame is made anew, and all of the last; references of two sizes are fitted into the frame."""
    num_frames, height, width = size
    loaded = load("wan21_vace", folders / "wan21_vace")
    kwargs = {"num_reference_images": num_references, "conditioning_scale": 0.7}
    params = loaded.family.sampling(num_frames=num_frames, height=height, width=width, sampler_kwargs=kwargs)
    generator = torch.Generator().manual_seed(0)
    video = torch.randint(0, 256, (num_frames, 3, height, width), generator=generator) / 255
    mask = torch.zeros(num_frames, 1, height, width)
    mask[:, :, : height // 2], mask[-1] = 1.0, 1.0
    inputs: dict[str, Primitive] = {"video": Videos.pack(frames=[video]), "mask": Videos.pack(frames=[mask])}
    if num_references:
        images = [torch.randint(0, 256, (3, 40, side), generator=generator) / 255 for side in (24, 70)]
        inputs["image"] = ImageLists(images=[images])
    noise = torch.randn(1, *loaded.ours.latent_shape(params), generator=generator)
    request = Request(FOUR[:1], params, noise, inputs)
    stock_inputs = inputs | {"mask": Videos.pack(frames=[mask.expand(-1, 3, -1, -1)])}
    loaded.stock.scheduler = pinned(loaded.ours.sigmas(params))
    with torch.no_grad():
        expected = loaded.stock(
            **call_vace(dataclasses.replace(request, inputs=stock_inputs)),
            num_inference_steps=5,
            conditioning_scale=0.7,
            output_type="latent",
        ).frames
    found = loaded.sample(request)
    assert found.shape == expected.shape and found.shape[2] == num_references + (num_frames - 1) // 4 + 1
    assert relative(found, expected) <= 1e-5
    frames = loaded.ours.decode(found, params)
    assert isinstance(frames, Videos) and frames.frames.shape == (num_frames, 3, height, width)


def test_vace_refuses_videos_of_another_length_masks_alone_and_other_counts(folders: Path) -> None:
    adapter, params = adapter_of("wan21_vace", folders)
    video: dict[str, Primitive] = {"video": Videos.pack(frames=[torch.rand(9, 3, 32, 32)])}
    small: dict[str, Primitive] = {"video": Videos.pack(frames=[torch.rand(5, 3, 16, 32)])}
    mask: dict[str, Primitive] = {"mask": Videos.pack(frames=[torch.rand(5, 1, 32, 32)])}
    for inputs, message in (
        (video, "the video of sample 0 has 9 frames; 5 are sampled"),
        (small, r"the video of sample 0 is \(height, width\) = \(16, 32\); sampled are \(32, 32\)"),
        (mask, "a mask of no video"),
        (first_frames(1), "takes 0 images per sample; sample 0 brings 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            adapter.encode({"text": Texts(texts=["a"]), **inputs}, params)


def test_animate_reads_frames_as_lists_of_pictures_and_refuses_what_it_cannot_follow(folders: Path) -> None:
    adapter, params = adapter_of("wan22_animate", folders)
    texts, given = Texts(texts=["a"]), animated(1)
    pose, mask = given["pose"], clips(1, 32, 32, 5)
    assert isinstance(pose, Videos)
    as_lists = {**given, "pose": ImageLists(images=[list(pose.unpack("frames")[0])])}
    both = [adapter.encode({"text": texts, **inputs}, params)["pose"] for inputs in (given, as_lists)]
    assert all(isinstance(each, ImageLatentCondition) for each in both) and same_value(*both)
    uneven = ImageLists(images=[[torch.rand(3, 8, 8 + frame) for frame in range(5)]])
    still = {slot: media for slot, media in given.items() if slot != "face"}
    long = {**given, "face": Videos.pack(frames=[torch.rand(9, 3, 16, 16)])}
    for inputs, message in (
        (still, "Wan Animate needs videos in the slots"),
        (long, "the face of sample 0 has 9 frames; 5 are sampled"),
        ({**given, "pose": uneven}, "the pose of sample 0 has frames of the sizes"),
        ({**given, "mask": mask}, "Give both or neither"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            adapter.encode({"text": texts, **inputs}, params)
    with pytest.raises(ConfigError, match="num_frames = 1 moves nothing"):
        adapter.encode({"text": texts, **given}, dataclasses.replace(params, num_frames=1))
