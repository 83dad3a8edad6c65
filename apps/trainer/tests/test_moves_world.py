from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import unirl.worlds.moves.world
from unirl.reward.worlds.moves import score_moves
from unirl.reward.worlds.moves_grammar import CATEGORIES, MOTIONS, MovesSpec, parse_prompt, prompt_of
from unirl.worlds.moves import world

FOLDER = Path(unirl.worlds.moves.world.__file__).parent


def drawn(prompt: str, place: int = 0, seed: int = 0) -> torch.Tensor:
    """A clean video of a prompt, float32 [T, 3, 32, 32]; `place` chooses among the scenes that fit it."""
    scene = world.scenes_for(parse_prompt(prompt))[place]
    return torch.from_numpy(world.render(scene, np.random.default_rng(seed))).float() / 255


def judged(video: torch.Tensor, prompt: str) -> tuple[float, float]:
    strict, soft = score_moves([video], [prompt])
    return strict.item(), soft.item()


def test_every_prompt_parses_back_to_itself() -> None:
    prompts = world.all_prompts()
    assert len(prompts) == len(set(prompts)) == 1395
    assert [prompt_of(parse_prompt(prompt)) for prompt in prompts] == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "a red circle",
        "a yellow circle stays",
        "red circle stays",
        "a red circle moves",
        "a red circle stays, a red square stays",
        "a red circle stays, a blue square stays, a green square stays",
    ],
)
def test_a_sentence_outside_the_grammar_is_named_in_the_error(prompt: str) -> None:
    with pytest.raises(ValueError, match="is not a sentence of the moves world"):
        score_moves([torch.zeros(5, 3, 32, 32)], [prompt])


def test_one_frame_is_no_video() -> None:
    with pytest.raises(ValueError, match=r"expected B videos \[T > 1, 3, H, W\]"):
        score_moves([torch.zeros(1, 3, 32, 32)], ["a red circle stays"])


def test_clean_drawings_of_every_prompt_pass() -> None:
    rng = np.random.default_rng(0)
    prompts = world.all_prompts()
    scenes = [world.sample_scene(parse_prompt(prompt), rng, near_miss_fraction=0.0) for prompt in prompts]
    strict, soft = score_moves([torch.from_numpy(world.render(scene, rng)) for scene in scenes], prompts)
    assert strict.mean() >= 0.99
    assert torch.equal(strict == 1, soft == 1)


def test_near_misses_of_every_prompt_fail_with_partial_credit() -> None:
    rng = np.random.default_rng(1)
    prompts = world.all_prompts()
    videos = [torch.from_numpy(world.render(world.near_miss(parse_prompt(p), rng), rng)) for p in prompts]
    strict, soft = score_moves(videos, prompts)
    assert strict.sum() == 0
    assert 0.5 < soft.mean() < 0.9


@pytest.mark.parametrize("asked", MOTIONS)
@pytest.mark.parametrize("shown", MOTIONS)
def test_only_the_motion_that_was_asked_for_passes(asked: str, shown: str) -> None:
    strict, soft = judged(drawn(f"a blue triangle {shown}"), f"a blue triangle {asked}")
    assert strict == (asked == shown)
    # The object is right in every frame; its motion is the other half.
    assert soft == (1.0 if asked == shown else 0.5)


@pytest.mark.parametrize(
    ("shown", "soft"),
    [
        ("a green circle moves up", 0.25),  # shape alone in every frame, nothing red that moves
        ("a red square moves up", 0.75),  # colour alone, and its motion
        ("a red circle moves up, a blue square stays", 0.75),
    ],
)
def test_a_wrong_colour_shape_or_number_fails_and_earns_its_share(shown: str, soft: float) -> None:
    assert judged(drawn(shown), "a red circle moves up") == (0.0, pytest.approx(soft))


def test_swapped_motions_of_two_objects_fail() -> None:
    prompt = "a red circle moves up, a blue square stays"
    assert judged(drawn(prompt, place=2), prompt) == (1.0, 1.0)
    assert judged(drawn(prompt, place=2), "a red circle stays, a blue square moves up") == (0.0, 0.5)


def test_a_jump_a_step_back_and_a_change_of_size_are_not_steady() -> None:
    video, prompt = drawn("a red circle moves right"), "a red circle moves right"
    jump = video[[0, 0, 0, 4, 4]]
    back = video[[0, 2, 1, 3, 4]]
    drift = torch.stack([torch.roll(frame, shift, dims=1) for frame, shift in zip(video, (0, 3, 0, 3, 0), strict=True)])
    for broken in (jump, back, drift):
        assert judged(broken, prompt) == (0.0, 0.75)
    small = torch.nn.functional.interpolate(video[2:3], scale_factor=0.7, mode="bilinear", antialias=True)
    shrunk = video[[2, 2, 2, 2, 2]].clone()
    shrunk[4] = 0
    shrunk[4, :, 3:25, 3:25] = small[0]
    strict, soft = judged(shrunk, "a red circle stays")
    assert strict == 0 and soft < 1


def test_an_object_that_is_absent_from_one_frame_or_changes_colour_fails() -> None:
    prompt = "a red circle stays"
    absent = drawn(prompt)
    absent[3] = 0
    assert judged(absent, prompt) == (0.0, pytest.approx(0.4))
    recoloured = drawn(prompt)
    recoloured[3] = drawn("a blue circle stays")[3]
    assert judged(recoloured, prompt) == (0.0, pytest.approx(0.45))


def test_a_blurred_video_passes_and_noise_fails() -> None:
    prompt = "a red circle moves up, a blue square moves left"
    video = drawn(prompt, place=2)
    assert judged(torch.nn.functional.avg_pool2d(video, 3, stride=1, padding=1), prompt)[0] == 1
    noise = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert judged(noise, prompt)[0] == 0


def test_scores_do_not_depend_on_the_neighbours_in_the_batch() -> None:
    rng = np.random.default_rng(2)
    prompts = world.split_prompts()[1]
    scenes = [world.sample_scene(parse_prompt(p), rng, near_miss_fraction=0.5) for p in prompts]
    videos = [torch.from_numpy(world.render(scene, rng)).float() / 255 for scene in scenes]
    strict, soft = score_moves(videos, prompts)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = score_moves([videos[i] for i in order], [prompts[i] for i in order])
    assert torch.equal(strict[order], shuffled[0])
    assert torch.equal(soft[order], shuffled[1])


def test_no_heldout_request_is_asked_for_in_training_in_either_order() -> None:
    train, heldout = world.split_prompts()
    keys = [{world.scene_key(parse_prompt(prompt)) for prompt in prompts} for prompts in (train, heldout)]
    assert not keys[0] & keys[1]
    for prompts in (train, heldout):
        assert {parse_prompt(prompt).category for prompt in prompts} == set(CATEGORIES)
    pair = parse_prompt("a red circle stays, a blue square moves up")
    assert world.scene_key(pair) == world.scene_key(MovesSpec(pair.objects[::-1]))


def test_shipped_prompt_files_are_the_split(tmp_path: Path) -> None:
    world.write_prompts(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (FOLDER / "data" / name).read_text() == (tmp_path / name).read_text()
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert len({row["prompt_id"] for row in rows}) == len(rows)
        assert all(row["metadata"]["category"] == parse_prompt(row["prompt"]).category for row in rows)


def test_shipped_checkpoint_is_small() -> None:
    files = [path for path in (FOLDER / "checkpoint").rglob("*") if path.is_file()]
    assert 1e6 < sum(path.stat().st_size for path in files) <= 6e6


def test_a_stock_pipeline_draws_with_the_shipped_checkpoint_far_above_chance() -> None:
    from diffusers import WanPipeline

    from unirl.worlds.moves.text import TOKENS

    pipeline = WanPipeline.from_pretrained(str(FOLDER / "checkpoint"))
    pipeline.set_progress_bar_config(disable=True)
    prompts = world.split_prompts()[1] * 4
    videos = pipeline(
        prompts,
        num_inference_steps=6,
        guidance_scale=1.0,
        height=32,
        width=32,
        num_frames=world.NUM_FRAMES,
        max_sequence_length=TOKENS,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).frames
    strict, _ = score_moves(list(videos.float()), prompts)
    shuffled, _ = score_moves(list(videos.float()), prompts[7:] + prompts[:7])
    # Binomial error over 116 samples is 0.04; a video drawn for another prompt hardly ever passes.
    assert strict.mean() > 0.15
    assert shuffled.mean() < 0.05
