from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from unirl.data.datasets import read_rows
from unirl.reward.worlds.edits import score_edits
from unirl.reward.worlds.edits_grammar import CATEGORIES, Edit, all_edits, parse_edit, prompt_of
from unirl.reward.worlds.edits_scorer import EditsRewardScorer
from unirl.reward.worlds.shapes_grammar import ShapeObject
from unirl.trainer.request import repeated
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest
from unirl.worlds.shapes.edits import world
from unirl.worlds.shapes.edits.world import Placed, Scene, applied, render

RED_CIRCLE = Placed(ShapeObject("red", "circle"), 0, (0.5, -1.0), 5.5)
BLUE_SQUARE = Placed(ShapeObject("blue", "square"), 3, (0.0, 1.0), 6.0)
SCENE: Scene = (RED_CIRCLE, BLUE_SQUARE)


def picture(scene: Scene) -> torch.Tensor:
    return torch.from_numpy(render(scene))


def judged(result: Scene, prompt: str, scene: Scene = SCENE) -> tuple[float, float]:
    strict, soft = score_edits(picture(result)[None], picture(scene)[None], [prompt])
    return strict.item(), soft.item()


def test_every_instruction_parses_back_to_itself() -> None:
    edits = all_edits()
    prompts = [prompt_of(edit) for edit in edits]
    assert len(set(prompts)) == len(prompts) == 33
    assert [parse_edit(prompt) for prompt in prompts] == edits


@pytest.mark.parametrize("prompt", ["", "make the square", "make the square purple", "turn the circle into a circle"])
def test_an_instruction_outside_the_grammar_is_named_in_the_error(prompt: str) -> None:
    with pytest.raises(ValueError, match="is no instruction of the edits world"):
        score_edits(torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32), [prompt])


def test_a_picture_without_the_object_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="shows 0 objects of the shape triangle, it must show one"):
        judged(SCENE, "remove the triangle")


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        ("make the square green", (RED_CIRCLE, replace(BLUE_SQUARE, item=ShapeObject("green", "square")))),
        ("turn the square into a triangle", (RED_CIRCLE, replace(BLUE_SQUARE, item=ShapeObject("blue", "triangle")))),
        ("remove the square", (RED_CIRCLE,)),
        ("move the square to the left", (RED_CIRCLE, replace(BLUE_SQUARE, quadrant=2))),
        ("move the square up", (RED_CIRCLE, replace(BLUE_SQUARE, quadrant=1))),
    ],
)
def test_the_right_result_passes_and_every_departure_from_it_fails(prompt: str, right: Scene) -> None:
    assert applied(SCENE, parse_edit(prompt)) == right
    assert judged(right, prompt) == (1.0, 1.0)
    others = tuple(each for each in right if each == RED_CIRCLE)
    rest = tuple(each for each in right if each != RED_CIRCLE)
    free = next(quadrant for quadrant in range(4) if quadrant not in {each.quadrant for each in right})
    extra = Placed(ShapeObject("yellow", "circle"), free, (0.0, 0.0), 5.0)
    departures = {
        "nothing done": SCENE,
        "the other object gone": rest,
        "the other object recoloured": (replace(others[0], item=ShapeObject("yellow", "circle")), *rest),
        "the other object reshaped": (replace(others[0], item=ShapeObject("red", "square")), *rest),
        "the other object shifted": (replace(others[0], offset_yx=(4.5, -1.0)), *rest),
        "the other object smaller": (replace(others[0], radius=4.3), *rest),
        "one object more": (*right, extra),
    }
    for name, result in departures.items():
        strict, soft = judged(result, prompt)
        assert strict == 0 and soft < 1, name


def test_partial_credit_tells_half_done_from_not_done() -> None:
    recoloured = (RED_CIRCLE, replace(BLUE_SQUARE, item=ShapeObject("green", "circle")))
    assert judged(recoloured, "make the square green") == (0.0, 0.75)
    assert judged(SCENE, "make the square green") == (0.0, 0.25)
    assert judged((), "make the square green") == (0.0, 0.0)


def test_every_drawn_result_passes_and_every_near_miss_fails() -> None:
    rng = np.random.default_rng(0)
    sources, rights, wrongs, prompts = [], [], [], []
    for number in range(200):
        scene, edit = world.draw_task(CATEGORIES[number % len(CATEGORIES)], rng, heldout=False)
        right = applied(scene, edit)
        assert right is not None
        if not world.is_satisfiable(render(scene), render(right), edit):
            continue
        sources.append(picture(scene))
        rights.append(picture(right))
        wrongs.append(picture(world.near_miss(scene, edit, rng)))
        prompts.append(prompt_of(edit))
    assert len(prompts) > 190
    strict, soft = score_edits(torch.stack(rights), torch.stack(sources), prompts)
    assert strict.all() and (soft == 1).all()
    noise = 0.05 * torch.randn(len(rights), 3, 32, 32, generator=torch.Generator().manual_seed(0))
    blurred = torch.stack(rights) / 255 + noise
    assert score_edits(blurred, torch.stack(sources), prompts)[0].mean() > 0.97
    strict, soft = score_edits(torch.stack(wrongs), torch.stack(sources), prompts)
    assert not strict.any() and (soft < 1).all()


def test_only_what_changes_something_and_has_room_can_be_asked_for() -> None:
    assert applied(SCENE, Edit("color", "circle", "red")) is None
    assert applied(SCENE, Edit("remove", "triangle")) is None
    assert applied(SCENE, Edit("move", "circle", "up")) is None
    full = (RED_CIRCLE, replace(BLUE_SQUARE, quadrant=1))
    assert applied(full, Edit("move", "circle", "to the right")) is None


def test_the_packaged_tasks_are_what_the_generator_writes_and_keep_the_split(tmp_path) -> None:
    world.write_tasks(tmp_path)
    packaged = world.FOLDER / "data"
    for name, number in (("train", world.NUM_TRAIN), ("heldout", world.NUM_HELDOUT)):
        written = (tmp_path / f"{name}.jsonl").read_text()
        assert written == (packaged / f"{name}.jsonl").read_text()
        assert (tmp_path / f"{name}.png").read_bytes() == (packaged / f"{name}.png").read_bytes()
        assert len(written.splitlines()) == number
    row = json.loads(written.splitlines()[0])
    assert parse_edit(row["prompt"]).category == row["metadata"]["category"]


def test_the_scorer_reads_the_pictures_of_data_rows() -> None:
    rows = read_rows(world.FOLDER / "data" / "heldout.jsonl")[:3]
    fields = repeated(rows, 2)
    sources = torch.stack([images[0] for images in fields["primitives"]["image"].images])
    request = RewardRequest(
        sample_ids=fields["sample_ids"], primitives=fields["primitives"], generated={"image": Images(pixels=sources)}
    )
    scores = EditsRewardScorer().score_batch(request)
    assert scores["strict"].tolist() == [0.0] * 6
    assert scores["soft"].tolist() == [0.25] * 6
    bare = request.replace(primitives={"text": Texts(texts=request.prompts)})
    with pytest.raises(ConfigError, match="Give the data rows per image"):
        EditsRewardScorer().score_batch(bare)
    larger = request.replace(generated={"image": Images(pixels=torch.zeros(6, 3, 64, 64))})
    with pytest.raises(ConfigError, match=r"needs one input image \(3, 64, 64\) a sample"):
        EditsRewardScorer().score_batch(larger)
