"""The thoughts world: plans say what layouts show, the base errs as announced, and its checkpoint can be made."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from unirl.pretraining.autoencoding import signed
from unirl.reward.worlds.shapes_grammar import parse_prompt
from unirl.worlds.shapes.evaluate import decode_latents
from unirl.worlds.shapes.thoughts import pretrain
from unirl.worlds.shapes.thoughts.evaluate import evaluate, load
from unirl.worlds.shapes.thoughts.plans import (
    MISREAD_FRACTION,
    SLIP_FRACTION,
    drawn,
    is_right,
    layout_of,
    plan_of,
    planned,
)
from unirl.worlds.shapes.thoughts.text import plan_tokenizer
from unirl.worlds.shapes.world import all_layouts, all_prompts, layouts_for, render, split_prompts

LAYOUTS = all_layouts()


def test_a_plan_says_every_object_with_its_place_and_is_read_back():
    layout = layouts_for(parse_prompt("a red square left of a green circle"))[0]
    assert plan_of(layout) == "two things: red square top left, green circle top right"
    assert all(layout_of(plan_of(each)) == each for each in LAYOUTS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "two things",
        "one thing: red circle",
        "two things: red circle top left",
        "one thing: red circle top left, red circle top right",
        "two things: red circle top right, red square top left",
        "one thing: red circle top left.",
        "one thing: pink circle top left",
    ],
)
def test_what_is_no_plan_is_none(text: str):
    assert layout_of(text) is None and not is_right(text, parse_prompt("a red circle"))


@pytest.mark.parametrize(
    ("prompt", "plan", "right"),
    [
        ("a red circle", "one thing: red circle bottom left", True),
        ("a red circle", "one thing: red square bottom left", False),
        ("two blue squares", "two things: blue square top left, blue square bottom right", True),
        ("two blue squares", "one thing: blue square top left", False),
        ("a red circle above a blue square", "two things: red circle top left, blue square bottom right", True),
        ("a red circle above a blue square", "two things: blue square top left, red circle bottom right", False),
    ],
)
def test_a_plan_is_right_where_it_shows_what_was_asked_for(prompt: str, plan: str, right: bool):
    assert is_right(plan, parse_prompt(prompt)) is right


def test_the_base_misreads_its_words_and_slips_as_often_as_announced():
    rng = np.random.default_rng(0)

    def share(prompt: str) -> float:
        spec = parse_prompt(prompt)
        return float(np.mean([planned(spec, rng) in layouts_for(spec) for _ in range(2000)]))

    assert share("a red circle and a blue square") == 1.0
    # One standard error of 2000 draws is .01.
    for prompt in ("a yellow circle", "three red circles", "a red circle and a yellow square"):
        assert share(prompt) == pytest.approx(1 - MISREAD_FRACTION, abs=0.04)
    plan = layouts_for(parse_prompt("a red circle and a blue square"))[0]
    kept = float(np.mean([drawn(plan, rng) == plan for _ in range(2000)]))
    assert kept == pytest.approx(1 - SLIP_FRACTION, abs=0.04)


def test_whatever_is_planned_and_drawn_is_in_the_bank():
    rng, known = np.random.default_rng(1), set(LAYOUTS)
    for prompt in all_prompts():
        plan = planned(parse_prompt(prompt), rng)
        assert plan in known and drawn(plan, rng) in known
    assert all(drawn(layout, rng) in known for layout, _ in itertools.product(LAYOUTS[::7], range(4)))


def test_each_word_is_a_token_and_texts_come_back():
    tokenizer = plan_tokenizer([*all_prompts(), *map(plan_of, LAYOUTS)])
    assert tokenizer.vocab_size >= 256
    for text in ("a red square above a blue circle", plan_of(LAYOUTS[40]), "four green triangles", "naïve 3%"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    plan = plan_of(layouts_for(parse_prompt("a red square left of a green circle"))[0])
    assert len(tokenizer(plan)["input_ids"]) == len(plan.replace(":", " :").replace(",", " ,").split())


def test_the_adopted_autoencoder_decodes_as_its_source():
    source, ours = (
        AutoencoderKL.from_pretrained(pretrain.SHIPPED_VAE),
        pretrain.adopt_autoencoder(pretrain.make_config(300).vae),
    )
    rng = np.random.default_rng(0)
    pixels = signed(torch.from_numpy(np.stack([render(layout, rng) for layout in LAYOUTS[::200]])))
    with torch.no_grad():
        mean = source.encode(pixels).latent_dist.mean
        theirs = decode_latents(source, (mean - source.config["shift_factor"]) * source.config["scaling_factor"])
        latents = ours.encode(pixels)
        restored = (ours.decode(latents) / 2 + 0.5).clamp(0, 1)
    # float32 convolutions of weights that were scaled.
    torch.testing.assert_close(restored, theirs, rtol=0, atol=1e-4)
    torch.testing.assert_close(latents.std(), source.config["scaling_factor"] * mean.std(), rtol=1e-4, atol=0)


def test_the_shipped_model_plans_and_draws_partly_right():
    checkpoint = Path(pretrain.__file__).parent / "checkpoint"
    assert sum(path.stat().st_size for path in checkpoint.iterdir()) < 6e6
    prompts = split_prompts()[1]
    found = evaluate(load(checkpoint), prompts, num_samples=len(prompts), num_steps=4)
    assert 0.4 < found["plans"] < 0.75
    assert 0.1 < found["strict"] < found["plans"]


@pytest.mark.matrix
@pytest.mark.nightly
def test_a_checkpoint_can_be_made(tmp_path: Path):
    budget = pretrain.Budget(planner=2, painter=2)
    pretrain.pretrain(tmp_path / "made", seed=0, budget=budget)
    assert sum(path.stat().st_size for path in (tmp_path / "made").iterdir()) < 6e6
    prompts = split_prompts()[1]
    found = evaluate(load(tmp_path / "made"), prompts, num_samples=len(prompts), num_steps=1)
    assert set(found) == {"strict", "soft", "single", "color", "two", "count", "position", "plans"}
