"""Files of targets of fine-tuning: what a row becomes, and every way in which one can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from unirl.data.targets import TargetDataSource, read_targets
from unirl.types.errors import DataError

IMAGE = {"prompt": "a cat", "target": "good.png"}
VIDEO = {"prompt": "a cat runs", "target": "frames"}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    """A file of rows next to an image of 4 x 6 pixels, a folder of three of them and a broken file."""
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (6, 4)).save(folder / "good.png")
    (folder / "broken.png").write_text("no picture")
    (folder / "clip.mp4").write_text("not looked into by a check")
    (folder / "frames").mkdir(exist_ok=True)
    for number in range(3):
        Image.new("RGB", (6, 4)).save(folder / "frames" / f"{number}.png")
    path = folder / "targets.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_target_becomes_the_one_image_of_its_row(tmp_path: Path):
    inside = {"prompt": "two cats", "metadata": {"target": "good.png", "category": "count"}}
    first, second = read_targets(written(tmp_path, IMAGE, inside), size=(4, 6), num_frames=1)
    assert first.metadata["images"] == second.metadata["images"] == [f"{tmp_path}/good.png"]
    assert second.metadata["category"] == "count"


def test_the_best_image_of_a_preference_is_a_target(tmp_path: Path):
    path = written(tmp_path, {"prompt": "a cat", "images": ["broken.png", "good.png"], "scores": [0, 1]})
    (row,) = read_targets(path, size=(4, 6), num_frames=1)
    assert row.metadata["images"] == [f"{tmp_path}/good.png"]


def test_videos_are_folders_of_images_or_files(tmp_path: Path):
    rows = read_targets(written(tmp_path, VIDEO, {**VIDEO, "target": "clip.mp4"}), size=(4, 6), num_frames=3)
    assert [row.metadata["images"] for row in rows] == [[f"{tmp_path}/frames"], [f"{tmp_path}/clip.mp4"]]


def test_the_fingerprint_does_not_depend_on_the_folder(tmp_path: Path):
    sources = [TargetDataSource(str(written(tmp_path / name, IMAGE)), seed=3) for name in ("here", "there")]
    assert sources[0].state_dict() == sources[1].state_dict()
    assert sources[0].next(1)[0].metadata["images"] == [str(tmp_path / "here" / "good.png")]


@pytest.mark.parametrize(
    ("change", "num_frames", "message"),
    [
        ({"target": None}, 1, "target = None must be the file of what the model is to make"),
        ({"target": ["good.png"]}, 1, r"target = \['good.png'\] must be the file"),
        ({"target": "absent.png"}, 1, r"target absent\.png does not exist"),
        ({"target": "broken.png"}, 1, r"target broken\.png cannot be read as an image"),
        ({"target": "frames"}, 1, r"target frames cannot be read as an image"),
        ({"target": "absent.mp4"}, 3, r"target absent\.mp4 does not exist"),
        ({"target": "frames"}, 5, r"target frames has 3 frames, sampling\.num_frames = 5"),
    ],
)
def test_a_malformed_row_is_named_with_file_and_line(
    tmp_path: Path, change: dict[str, Any], num_frames: int, message: str
):
    first = {1: IMAGE, 3: VIDEO}.get(num_frames, {**VIDEO, "target": "clip.mp4"})
    path = written(tmp_path, first, {**IMAGE, **change})
    with pytest.raises(DataError, match=rf"targets\.jsonl:2: .*{message}"):
        read_targets(path, size=(4, 6), num_frames=num_frames)


@pytest.mark.parametrize(("row", "num_frames"), [(IMAGE, 1), (VIDEO, 3)])
def test_another_size_is_named(tmp_path: Path, row: dict[str, Any], num_frames: int):
    with pytest.raises(DataError, match=r"has 4 x 6 pixels .* = 8 x 8"):
        read_targets(written(tmp_path, row), size=(8, 8), num_frames=num_frames)
