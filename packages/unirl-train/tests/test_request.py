"""From prompt rows to a request: ids, repetition, noise ids, pinned sigmas."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusion_fakes import SHAPE, FieldBundle, FieldEngine, FieldPipeline, prompt_rows, sampling
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from unirl.data.data_source import PromptRow
from unirl.data.media import MediaRef
from unirl.distributed.runtime import LocalRuntime
from unirl.trainer.diffusion import DiffusionModality
from unirl.trainer.evaluation import EvaluationConfig, Evaluator
from unirl.trainer.request import build_request, shortened, unique_ids
from unirl.types.media import ImageLists, Texts
from unirl.types.rollout import RolloutReq

SIGMAS = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0])


def request(rows: list[PromptRow], *, rollout_id: int = 7, same_noise: bool = False, per_prompt: int = 2) -> RolloutReq:
    params = sampling(samples_per_prompt=per_prompt, init_same_noise=same_noise)
    return build_request(rows, params, sigmas=SIGMAS, latent_shape=SHAPE, rollout_id=rollout_id)


def test_every_prompt_is_repeated_next_to_itself():
    req = request(prompt_rows(2))
    assert req.group_ids == ["prompt:p0", "prompt:p0", "prompt:p1", "prompt:p1"]
    assert req.sample_ids == [
        "prompt:p0:sample:0",
        "prompt:p0:sample:1",
        "prompt:p1:sample:0",
        "prompt:p1:sample:1",
    ]
    texts = req.primitives["text"]
    assert isinstance(texts, Texts) and texts.texts == ["prompt 0", "prompt 0", "prompt 1", "prompt 1"]
    assert [row and row["category"] for row in req.metadata] == ["even", "even", "odd", "odd"]


def test_everything_an_engine_could_choose_is_pinned():
    req = request(prompt_rows(1))
    assert req.sigmas is not None and torch.equal(req.sigmas, SIGMAS)
    assert req.init_noise_latent_shape == list(SHAPE)
    assert req.rollout_id == 7
    assert req.sampling_params == sampling(samples_per_prompt=2)


def test_a_prompt_that_occurs_twice_gets_groups_of_its_own():
    rows = prompt_rows(1) * 3
    req = request(rows, per_prompt=1)
    assert req.group_ids == ["prompt:p0", "prompt:p0#1", "prompt:p0#2"]
    assert len(set(req.init_noise_group_ids)) == 3
    assert len(set(request(rows, per_prompt=1, same_noise=True).init_noise_group_ids)) == 3


@given(st.lists(st.sampled_from(["a", "a#1", "a#2", "a#1#1", "b"]), max_size=12))
def test_ids_are_unique_whatever_the_file_calls_its_prompts(ids: list[str]):
    unique = unique_ids(ids)
    assert len(set(unique)) == len(ids)
    assert all(new.startswith(old) for new, old in zip(unique, ids, strict=True))
    assert unique_ids(list(dict.fromkeys(ids))) == list(dict.fromkeys(ids))


def test_samples_of_a_group_share_their_start_only_where_asked():
    own = request(prompt_rows(2))
    assert len(set(own.init_noise_group_ids)) == 4
    shared = request(prompt_rows(2), same_noise=True).init_noise_group_ids
    assert shared[0] == shared[1] and shared[2] == shared[3] and shared[0] != shared[2]


def test_noise_changes_from_rollout_to_rollout_and_is_the_same_when_asked_again():
    first, again, later = (request(prompt_rows(2), rollout_id=number).init_noise_group_ids for number in (0, 0, 1))
    assert first == again and set(first).isdisjoint(later)


def test_steps_behind_the_last_stochastic_one_are_compressed():
    params = sampling(sde_indices=[0], post_step_ratio=0.4, post_solver="dpmpp_2m")
    fewer, sigmas = shortened(params, SIGMAS)
    # Three steps after position 1 become one.
    assert sigmas.tolist() == SIGMAS[[0, 1, 4]].tolist() and fewer.num_inference_steps == 2
    assert fewer.sde_indices == [0] and fewer.post_solver == "dpmpp_2m"
    wider, sigmas = shortened(sampling(sde_indices=[0], post_step_ratio=0.75), SIGMAS)
    assert sigmas.tolist() == SIGMAS[[0, 1, 3, 4]].tolist() and wider.num_inference_steps == 3


def test_a_schedule_stays_where_nothing_is_behind_the_stochastic_steps():
    for params in (sampling(), sampling(sde_indices=[3], post_step_ratio=0.4), sampling(eta=0.0, sde_indices=[])):
        same, sigmas = shortened(params, SIGMAS)
        assert same is params and sigmas is SIGMAS


def test_images_of_the_rows_are_in_the_request(tmp_path):
    files = [tmp_path / f"{name}.png" for name in ("red", "blue")]
    for file, colour in zip(files, ((255, 0, 0), (0, 0, 255)), strict=True):
        Image.new("RGB", (4, 2), colour).save(file)
    rows = [
        PromptRow(f"repaint {file.stem}", file.stem, media=(MediaRef("image", "condition", str(file)),))
        for file in files
    ]
    found = request(rows, per_prompt=2).primitives["image"]
    assert isinstance(found, ImageLists) and found.batch_size == 4
    assert [[tuple(image[:, 0, 0].tolist()) for image in images] for images in found.images] == [
        [(1.0, 0.0, 0.0)],
        [(1.0, 0.0, 0.0)],
        [(0.0, 0.0, 1.0)],
        [(0.0, 0.0, 1.0)],
    ]
    assert set(request(prompt_rows(2)).primitives) == {"text"}


def test_masks_of_the_rows_are_a_slot_of_their_own(tmp_path):
    for name, level in (("photo", 100), ("hole", 255)):
        Image.new("L", (4, 2), level).save(tmp_path / f"{name}.png")
    refs = (
        MediaRef("image", "mask", str(tmp_path / "hole.png")),
        MediaRef("image", "condition", str(tmp_path / "photo.png")),
    )
    found = request([PromptRow("a cat", "0", media=refs)], per_prompt=2).primitives
    assert set(found) == {"text", "image", "mask"}
    for slot, level in (("image", 100 / 255), ("mask", 1.0)):
        lists = found[slot]
        assert isinstance(lists, ImageLists)
        assert [[float(image.mean()) for image in images] for images in lists.images] == [[pytest.approx(level)]] * 2


def test_prompts_are_encoded_ahead_with_their_pictures_and_as_they_are_sampled(tmp_path):
    """Each distinct pair of a text and its images once for training and once for evaluation."""
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)

    def row(text: str, *names: str) -> PromptRow:
        media = tuple(MediaRef("image", "condition", name, folder=str(tmp_path)) for name in names)
        return PromptRow(prompt=text, prompt_id="/".join((text, *names)), media=media)

    engine = FieldEngine(FieldPipeline(FieldBundle().model))
    runtime = LocalRuntime(lambda _: {"engine": engine})
    data: Any = SimpleNamespace(rows=[row("red", "a.png"), row("red", "a.png"), row("red", "b.png"), row("blue")])
    config = EvaluationConfig(prompts="", num_samples=3, num_inference_steps=2)
    evaluator = Evaluator(config, [row("green", "a.png", "b.png")], sampling())
    DiffusionModality().prepare(runtime, data, sampling(), evaluator)
    assert engine.events == []
    engine.is_ahead = True
    DiffusionModality().prepare(runtime, data, sampling(), evaluator)
    assert engine.events == [
        ("encode_ahead", ["red", "red", "blue"], [1, 1, 0], sampling().num_inference_steps),
        ("encode_ahead", ["green"], [2], 2),
        "drop_text_encoders",
    ]


def test_frames_of_a_video_are_the_slot_of_its_role_and_shared_by_the_samples_of_a_row(tmp_path):
    refs = []
    for role in ("pose", "face"):
        for frame in range(3):
            Image.new("L", (4, 2), 10 * frame).save(tmp_path / f"{role}{frame}.png")
            refs.append(MediaRef("video", role, str(tmp_path / f"{role}{frame}.png")))
    found = request([PromptRow("it waves", "0", media=tuple(refs))], per_prompt=2).primitives
    assert set(found) == {"text", "pose", "face"}
    for slot in ("pose", "face"):
        clips = found[slot]
        assert isinstance(clips, ImageLists)
        assert [round(float(frame.mean()) * 255) for frame in clips.images[0]] == [0, 10, 20]
        assert all(one is other for one, other in zip(*clips.images, strict=True))
