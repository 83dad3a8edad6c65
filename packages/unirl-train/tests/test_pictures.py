"""Prompts with images: every way in which a file can hold them gives the same tensors, and what is wrong is named."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from unirl.data.choices import multiple_choice
from unirl.data.data_source import MultimodalRLDataSource
from unirl.data.datasets import read_rows
from unirl.data.pictures import prompt_pictures, read_picture
from unirl.trainer.request import build_text_request
from unirl.types.errors import DataError
from unirl.types.media import ImageLists
from unirl.types.sampling import ARSamplingParams


def painted(width: int, height: int) -> Image.Image:
    """Every pixel has its own colour."""
    picture = Image.new("RGB", (width, height))
    picture.putdata([(10 * x, 20 * y, 7) for y in range(height) for x in range(width)])
    return picture


def expected(width: int, height: int) -> torch.Tensor:
    x, y = torch.arange(width).expand(height, -1), torch.arange(height)[:, None].expand(-1, width)
    return torch.stack([10 * x, 20 * y, torch.full_like(x, 7)]).float() / 255


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def written(folder: Path, *rows: dict[str, Any], name: str = "p.jsonl") -> Path:
    """A file of rows next to an image of 6 x 4 pixels."""
    painted(6, 4).save(folder / "a.png")
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def media(uri: str) -> dict[str, Any]:
    return {"modality": "image", "role": "condition", "uri": uri}


def pictures(path: Path) -> list[list[torch.Tensor]]:
    return prompt_pictures([row.media for row in read_rows(path)]).images


def test_media_and_image_lists_name_the_same_pictures_in_their_order(tmp_path: Path):
    painted(3, 5).save(tmp_path / "b.png")
    first, second = pictures(
        written(
            tmp_path,
            {"prompt": "q", "media": [media("a.png"), media("b.png")]},
            {"prompt": "q", "images": ["a.png", str(tmp_path / "b.png")], "metadata": {"answer": "x"}},
        )
    )
    for one in (first, second):
        assert torch.equal(one[0], expected(6, 4)) and torch.equal(one[1], expected(3, 5))


def test_a_media_fragment_is_a_part_of_a_sheet(tmp_path: Path):
    row = {"prompt": "q", "images": ["a.png#xywh=2,1,3,2", "a.png#xywh=pixel:0,0,6,4"]}
    ((part, whole),) = pictures(written(tmp_path, row))
    assert torch.equal(part, expected(6, 4)[:, 1:3, 2:5]) and torch.equal(whole, expected(6, 4))


def test_tables_hold_the_files_themselves(tmp_path: Path):
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"problem": "what?", "images": [{"bytes": png(painted(6, 4)), "path": None}] * n, "answer": str(n)}
        for n in (1, 2)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    table = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    table.save_to_disk(tmp_path / "folder")
    for name in ("t.parquet", "folder"):
        read = read_rows(tmp_path / name)
        assert [row.prompt for row in read] == ["what?"] * 2
        assert [row.metadata for row in read] == [{"answer": "1"}, {"answer": "2"}]
        found = prompt_pictures([row.media for row in read])
        assert [len(each) for each in found.images] == [1, 2]
        assert all(torch.equal(image, expected(6, 4)) for each in found.images for image in each)


def test_a_broken_table_is_named(tmp_path: Path):
    pytest.importorskip("pyarrow")
    (tmp_path / "t.parquet").write_text("no table")
    with pytest.raises(DataError, match="t.parquet: cannot be read as parquet"):
        read_rows(tmp_path / "t.parquet")


def test_pictures_are_upright_rgb_on_white(tmp_path: Path):
    turned = painted(6, 4)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    Image.new("L", (2, 2), 9).save(tmp_path / "grey.png")
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    names = ["turned.png", "grey.png", "clear.png"]
    ((turned_, grey, clear),) = pictures(written(tmp_path, {"prompt": "q", "images": names}))
    assert torch.equal(turned_, expected(6, 4).rot90(-1, (1, 2)))
    assert grey.unique().tolist() == [torch.tensor(9 / 255).item()] and grey.shape == (3, 2, 2)
    assert clear.unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["absent.png"]}, r"the image absent\.png does not exist .*Mend its path"),
        ({"images": ["a.png", "broken.png"]}, r"the image broken\.png cannot be read as an image"),
        (
            {"images": ["a.png#xywh=4,0,3,4"]},
            r"a\.png#xywh=4,0,3,4 names a part that its image of 6 x 4 pixels does not have",
        ),
        ({"images": []}, "images must be a list of at least one image"),
        ({"images": [3]}, "image 1 must be a path, or what a table holds for one"),
        ({"images": ["a.png"], "media": [media("a.png")]}, "both `media` and `images`; give one"),
        ({"images": ["a.png"], "choices": ["1", "2"]}, "answer = None must be a letter of A, B, or exactly one of"),
    ],
)
def test_a_row_with_a_wrong_picture_is_named_before_anything_runs(tmp_path: Path, row: dict[str, Any], message: str):
    (tmp_path / "broken.png").write_text("no picture")
    path = written(tmp_path, {"prompt": "q", "images": ["a.png"]}, {"prompt": "q", **row})
    with pytest.raises(DataError, match=rf"p\.jsonl:2: .*{message}"):
        MultimodalRLDataSource(str(path))


def test_a_picture_that_goes_away_during_the_run_is_named(tmp_path: Path):
    (row,) = read_rows(written(tmp_path, {"prompt": "q", "images": ["a.png"]}))
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png does not exist. Mend its path or remove the row"):
        read_picture(row.media[0])


def test_a_rated_image_is_no_picture_of_the_prompt(tmp_path: Path):
    (row,) = read_rows(written(tmp_path, {"prompt": "q", "images": ["a.png", "a.png"], "scores": [1, 0]}))
    assert row.media == () and row.metadata["images"] == ["a.png", "a.png"]


def test_a_fingerprint_is_of_the_rows_and_not_of_their_folder(tmp_path: Path):
    states = []
    for name, uri in (("here", "a.png"), ("there", "a.png"), ("other", "a.png#xywh=0,0,2,2")):
        (tmp_path / name).mkdir()
        path = written(tmp_path / name, {"prompt": "q", "images": [uri]})
        states.append(MultimodalRLDataSource(str(path)).state_dict()["fingerprint"])
    assert states[0] == states[1] != states[2]


def test_a_request_shows_every_sample_of_a_group_the_same_pictures(tmp_path: Path):
    path = written(tmp_path, {"prompt": "q", "images": ["a.png"]}, {"prompt": "r", "images": ["a.png", "a.png"]})
    params = ARSamplingParams(temperature=1.0, samples_per_prompt=2)
    req = build_text_request(read_rows(path), params, rollout_id=0)
    shown = req.primitives["image"]
    assert isinstance(shown, ImageLists) and [len(each) for each in shown.images] == [1, 1, 2, 2]
    assert shown.sources == [("a.png",)] * 2 + [("a.png", "a.png")] * 2
    assert shown.images[0][0] is shown.images[1][0]  # one tensor, however many samples


def test_choices_become_lettered_lines_and_the_answer_a_letter():
    assert multiple_choice("x?", ["3", "5 cm"], "5 cm") == ("x?\nA. 3\nB. 5 cm", "B")
    assert multiple_choice("x?", ["3", "5", "A"], "B")[1] == "B"
    for answer in (1, "1", None, "C"):
        with pytest.raises(DataError, match="must be a letter of A, B, or exactly one of"):
            multiple_choice("x?", ["3", "5"], answer)
    with pytest.raises(DataError, match="must be a list of 2 to 9"):
        multiple_choice("x?", ["3"], "A")


def test_a_multiple_choice_row_keeps_its_choices(tmp_path: Path):
    row = {"problem": "<image>x?", "images": ["a.png"], "choices": ["3", "5"], "answer": "5"}
    (read,) = read_rows(written(tmp_path, row))
    assert read.prompt == "<image>x?\nA. 3\nB. 5"
    assert read.metadata == {"choices": ["3", "5"], "answer": "B"}
