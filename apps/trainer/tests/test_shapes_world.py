from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import unirl.worlds.shapes.world
from unirl.reward.worlds.shapes import score_shapes, verify
from unirl.reward.worlds.shapes_grammar import CATEGORIES, PromptSpec, ShapeObject, parse_prompt, prompt_of
from unirl.worlds.shapes import world

FOLDER = Path(unirl.worlds.shapes.world.__file__).parent
RED_CIRCLE, BLUE_SQUARE = ShapeObject("red", "circle"), ShapeObject("blue", "square")


def drawings(layouts: list[world.Layout], seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([world.render(layout, rng) for layout in layouts]))


def test_every_prompt_parses_back_to_itself() -> None:
    prompts = world.all_prompts()
    assert len(prompts) == len(set(prompts)) == 600
    assert [prompt_of(parse_prompt(prompt)) for prompt in prompts] == prompts


@pytest.mark.parametrize(
    "prompt", ["", "a red hexagon", "five red circles", "two red circle", "a red circle and a red square", "red circle"]
)
def test_a_sentence_outside_the_grammar_is_named_in_the_error(prompt: str) -> None:
    with pytest.raises(ValueError, match="is not a sentence of the shapes world"):
        score_shapes(torch.zeros(1, 3, 32, 32), [prompt])


def test_clean_drawings_of_every_prompt_pass_in_every_category() -> None:
    rng = np.random.default_rng(0)
    prompts = [prompt for prompt in world.all_prompts() for _ in range(3)]
    layouts = [world.sample_layout(parse_prompt(prompt), rng, near_miss_fraction=0.0) for prompt in prompts]
    strict, soft = score_shapes(drawings(layouts), prompts)
    assert strict.mean() >= 0.99
    assert torch.equal(strict == 1, soft == 1)
    for category in CATEGORIES:
        assert strict[[parse_prompt(prompt).category == category for prompt in prompts]].mean() >= 0.98


def test_near_misses_of_every_prompt_fail_with_partial_credit() -> None:
    rng = np.random.default_rng(1)
    prompts = world.all_prompts()
    strict, soft = score_shapes(drawings([world.near_miss(parse_prompt(p), rng) for p in prompts]), prompts)
    # About one circle in 500 fills so much of its box on the pixel grid that it is read as a square.
    assert strict.sum() <= 3
    assert 0.5 < soft.mean() < 0.8


@pytest.mark.parametrize(
    ("prompt", "layout", "soft"),
    [
        ("a red circle", (BLUE_SQUARE, None, None, None), 0.0),
        ("a red circle", (None, ShapeObject("blue", "circle"), None, None), 0.5),
        ("a red circle", (None, None, ShapeObject("red", "square"), None), 0.5),
        ("a red circle", (RED_CIRCLE, None, None, RED_CIRCLE), 0.5),
        ("three red circles", (RED_CIRCLE, None, None, RED_CIRCLE), 2 / 3),
        ("a red circle and a blue square", (RED_CIRCLE, None, None, None), 0.5),
        (
            "a red circle and a blue square",
            (ShapeObject("blue", "circle"), ShapeObject("red", "square"), None, None),
            0.5,
        ),
        ("a red circle left of a blue square", (BLUE_SQUARE, RED_CIRCLE, None, None), 0.75),
        ("a red circle above a blue square", (RED_CIRCLE, BLUE_SQUARE, None, None), 0.75),
        ("a red circle above a blue square", (None, None, None, None), 0.0),
    ],
)
def test_a_planted_mistake_fails_and_earns_its_share(prompt: str, layout: world.Layout, soft: float) -> None:
    strict_B, soft_B = score_shapes(drawings([layout]), [prompt])
    assert strict_B.item() == 0
    assert soft_B.item() == pytest.approx(soft)


def test_a_diagonal_satisfies_both_of_its_relations() -> None:
    picture = drawings([(RED_CIRCLE, None, None, BLUE_SQUARE)])
    for relation, expected in (("left of", True), ("above", True), ("right of", False), ("below", False)):
        assert verify(picture[0], PromptSpec("position", (RED_CIRCLE, BLUE_SQUARE), relation)).strict is expected


def test_verify_names_what_it_found_and_agrees_with_the_batch() -> None:
    picture = drawings([(RED_CIRCLE, None, None, BLUE_SQUARE)])[0]
    verdict = verify(picture.float() / 255, parse_prompt("a red circle and a blue square"))
    assert verdict.strict and verdict.soft == 1
    assert {(found.color, found.shape) for found in verdict.details} == {("red", "circle"), ("blue", "square")}
    center = next(found.center_yx for found in verdict.details if found.color == "blue")
    assert center == pytest.approx((23.5, 23.5), abs=2.0)


def test_colour_without_a_name_is_clutter() -> None:
    picture = drawings([(RED_CIRCLE, None, None, None)]).float() / 255
    picture[:, :, 20:26, 20:26] = 1.0
    strict, soft = score_shapes(picture, ["a red circle"])
    assert strict.item() == 0
    assert soft.item() == 0.5


def test_scores_do_not_depend_on_the_neighbours_in_the_batch() -> None:
    rng = np.random.default_rng(2)
    prompts = world.split_prompts()[1]
    pictures = drawings([world.sample_layout(parse_prompt(p), rng, near_miss_fraction=0.5) for p in prompts])
    pictures = pictures.float() / 255 + 0.2 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
    strict, soft = score_shapes(pictures, prompts)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1))
    strict_shuffled, soft_shuffled = score_shapes(pictures[order], [prompts[i] for i in order.tolist()])
    assert torch.equal(strict[order], strict_shuffled)
    assert torch.equal(soft[order], soft_shuffled)


def test_no_heldout_request_is_asked_for_in_training_in_any_wording() -> None:
    train, heldout = world.split_prompts()
    keys = [{world.scene_key(parse_prompt(prompt)) for prompt in prompts} for prompts in (train, heldout)]
    assert not keys[0] & keys[1]
    for prompts in (train, heldout):
        assert {parse_prompt(prompt).category for prompt in prompts} == set(CATEGORIES)
    left = parse_prompt("a red circle left of a blue square")
    assert world.scene_key(left) == world.scene_key(parse_prompt("a blue square right of a red circle"))
    assert world.scene_key(left) != world.scene_key(replace(left, relation="right of"))


def test_shipped_prompt_files_are_the_split(tmp_path: Path) -> None:
    world.write_prompts(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (FOLDER / "data" / name).read_text() == (tmp_path / name).read_text()
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert len({row["prompt_id"] for row in rows}) == len(rows)
        assert all(row["metadata"]["category"] == parse_prompt(row["prompt"]).category for row in rows)


def test_shipped_checkpoint_is_small() -> None:
    files = [path for path in (FOLDER / "checkpoint").rglob("*") if path.is_file()]
    assert 1e6 < sum(path.stat().st_size for path in files) <= 8e6


def test_the_flux2_checkpoint_is_small_and_draws_far_above_chance() -> None:
    from unirl.worlds.shapes.evaluate_flux2 import evaluate, load

    folder = FOLDER / "checkpoint_flux2"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert 1e6 < sum(path.stat().st_size for path in files) <= 6e6
    pipeline = load(folder)
    prompts = world.split_prompts()[1]
    found = evaluate(pipeline, prompts, num_samples=len(prompts), num_steps=6, seed=0)
    # Binomial error over 59 samples is 0.065; chance is about 0.02, see the test below.
    assert found["strict"] > 0.2


def test_the_flux2_autoencoder_is_that_of_sd3_with_standardised_patches() -> None:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2

    from unirl.pretraining.autoencoding import signed
    from unirl.worlds.shapes.pretrain_flux2 import moments, patchified

    ours = AutoencoderKLFlux2.from_pretrained(FOLDER / "checkpoint_flux2" / "vae", torch_dtype=torch.float32)
    sd3s = AutoencoderKL.from_pretrained(FOLDER / "checkpoint" / "vae", torch_dtype=torch.float32)
    pictures = signed(drawings(world.all_layouts()[::4]))
    with torch.no_grad():
        mean = ours.encode(pictures).latent_dist.mode()
        assert torch.equal(mean, sd3s.encode(pictures).latent_dist.mode())
        shift, scale = moments(ours)
        latents = (patchified(mean) - shift) / scale
    # The statistics are of samples, whose variance is that of the means and the posterior's, .02 of it.
    assert latents.mean().abs() < 0.05 and 0.85 < latents.std() < 1.1


def test_a_stock_pipeline_draws_with_the_shipped_checkpoint_far_above_chance() -> None:
    from diffusers import StableDiffusion3Pipeline

    from unirl.worlds.shapes.text import T5_TOKENS

    torch.manual_seed(0)
    pipeline = StableDiffusion3Pipeline.from_pretrained(str(FOLDER / "checkpoint"))
    pipeline.set_progress_bar_config(disable=True)
    prompts = world.split_prompts()[1]
    pictures = pipeline(
        prompts,
        num_inference_steps=6,
        sigmas=np.linspace(1, 1 / 6, 6),
        guidance_scale=1.0,
        height=32,
        width=32,
        max_sequence_length=T5_TOKENS,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images
    strict, _ = score_shapes(pictures.float(), prompts)
    shuffled, _ = score_shapes(pictures.float(), prompts[7:] + prompts[:7])
    # Binomial error over 59 samples is 0.065; an image drawn for another prompt passes in about 1 of 50.
    assert strict.mean() > 0.25
    assert shuffled.mean() < 0.15
