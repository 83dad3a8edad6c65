"""Files of preferences: what a row becomes, and every way in which one can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from diffusion_fakes import FieldPipeline, prompt_rows, sampling
from PIL import Image
from torch import nn

from unirl.data.data_source import MultimodalRLDataSource
from unirl.data.pairs import PreferenceDataSource, read_pairs
from unirl.trainer.request import build_request
from unirl.types.errors import DataError
from unirl.types.preference import sample_place

GOOD = {"prompt": "a cat", "images": ["good.png", "sheet.png#1"], "scores": [1, 0.5]}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    """A file of rows next to an image of 4 x 6 pixels and a sheet of two of them."""
    Image.new("RGB", (6, 4)).save(folder / "good.png")
    Image.new("RGB", (12, 4)).save(folder / "sheet.png")
    (folder / "broken.png").write_text("no picture")
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_keeps_its_metadata_and_gets_absolute_references(tmp_path: Path):
    inside = {"prompt": "two cats", "metadata": {"images": ["good.png"] * 3, "scores": [3, 1, 2], "category": "count"}}
    path = written(tmp_path, GOOD, inside)
    first, second = read_pairs(path, size=(4, 6))
    assert first.metadata == {"images": [f"{tmp_path}/good.png", f"{tmp_path}/sheet.png#1"], "scores": [1, 0.5]}
    assert second.prompt == "two cats" and second.metadata["category"] == "count"


def test_the_source_continues_and_its_fingerprint_does_not_depend_on_the_folder(tmp_path: Path):
    states = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        source = PreferenceDataSource(str(written(tmp_path / name, GOOD, {**GOOD, "prompt": "a dog"})), seed=3)
        assert source.next(3)[0].metadata["images"][0] == str(tmp_path / name / "good.png")
        states.append(source.state_dict())
    assert states[0] == states[1] and states[0]["epoch"] == 1
    assert states[0] == {**MultimodalRLDataSource(str(tmp_path / "here/pairs.jsonl"), seed=3).state_dict(), **states[0]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": None}, "images = None must be a list of image files"),
        ({"images": "good.png"}, "images = 'good.png' must be a list of image files"),
        ({"images": ["good.png"], "scores": [1]}, "1 images, but 2 samples per prompt. Give at least 2"),
        ({"scores": [1]}, r"scores = \[1\] must be a list of 2 finite numbers"),
        ({"scores": None}, "scores = None must be a list of 2 finite numbers"),
        ({"scores": [1, float("nan")]}, "finite numbers"),
        ({"scores": [True, False]}, "finite numbers"),
        ({"scores": [2, 2]}, r"the scores \[2, 2\] are equal, so neither image is preferred. Remove the row"),
        ({"images": ["good.png", "absent.png"]}, r"image absent\.png does not exist"),
        ({"images": ["good.png", "broken.png"]}, r"image broken\.png cannot be read as an image"),
        ({"images": ["good.png", "sheet.png"]}, r"image sheet\.png has 4 x 12 pixels .* = 4 x 6"),
        ({"images": ["good.png", "sheet.png#2"]}, r"names tile 2 of a sheet of 4 x 12 pixels, which has none of 4 x 6"),
    ],
)
def test_a_malformed_row_is_named_with_file_and_line(tmp_path: Path, change: dict[str, Any], message: str):
    path = written(tmp_path, GOOD, {**GOOD, **change})
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2: .*{message}"):
        read_pairs(path, size=(4, 6))


def test_scores_that_are_used_must_differ(tmp_path: Path):
    path = written(tmp_path, {**GOOD, "images": ["good.png"] * 3, "scores": [1, 1, 0]})
    assert len(read_pairs(path, num_images=3)) == 1
    with pytest.raises(DataError, match=r"the scores \[1, 1\] are equal"):
        read_pairs(path, num_images=2)


def test_the_ids_of_a_request_say_the_place_in_the_group():
    params, pipeline = sampling(samples_per_prompt=2), FieldPipeline(nn.Identity())
    req = build_request(
        prompt_rows(2), params, sigmas=pipeline.sigmas(params), latent_shape=pipeline.shape, rollout_id=0
    )
    assert [sample_place(name) for name in req.sample_ids] == [0, 1, 0, 1]
