"""docs/reference/run_directory.md describes every field of a sample, and its example reads what a run writes."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from unirl.config.schema import Samples
from unirl.tracking.media_files import write_medium
from unirl.tracking.sample_files import SampleFiles
from unirl.types.samples import Image, Medium, SampleRecord, Sound, Text, Unshown, Video

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "run_directory.md").read_text(encoding="utf-8")
PIXELS, WAVE = torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(4)
MEDIA: dict[str, Medium] = {
    "image": Image(PIXELS, "cat.png"),
    "video": Video(PIXELS[None], 8.0, 1, Sound(WAVE, 8000)),
    "sound": Sound(WAVE, 8000),
    "text": Text("a cat", 2),
    "unshown": Unshown("Embeddings"),
}


def rows(heading: str) -> dict[str, str]:
    """First cell -> the rest, of the table whose head begins so."""
    table = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        first, _, rest = line.strip("| ").partition(" | ")
        found.update(dict.fromkeys(re.findall(r"`([^`]+)`", first), rest))
    return found


def test_every_field_of_a_line_is_described_and_no_other():
    fields = {field.name for field in dataclasses.fields(SampleRecord)}
    assert set(rows("field")) == fields | {"version", "kind", "step"}


def test_every_field_of_every_kind_of_media_is_described(tmp_path: Path):
    (tmp_path / "media").mkdir()
    described = rows("kind")
    assert set(described) == set(MEDIA)
    for kind, medium in MEDIA.items():
        written = write_medium(medium, tmp_path / "media", kind)
        named = set(re.findall(r"`(\w+)`", described[kind]))
        assert set(written) - {"kind"} <= named, kind


def test_keys_and_defaults_of_the_section_are_those_of_the_table():
    shown = {key.removeprefix("samples."): rest.partition(" | ")[0].strip("`") for key, rest in rows("key").items()}
    assert shown == {field.name: str(field.default) for field in dataclasses.fields(Samples)}


def test_the_example_reads_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    records = [
        SampleRecord(
            sample_id=f"{i}", track="image", group_id="p", prompt_id="p", prompt="a cat", media=medium, scores=scores
        )
        for i, (medium, scores) in enumerate([(MEDIA["image"], {"reward": 0.5}), (MEDIA["text"], {"reward": 0.25})])
    ]
    files = SampleFiles(tmp_path / "runs/mine/samples")
    files.write("rollout", 10, records)
    files.write("eval", 0, [dataclasses.replace(records[1], media=None, scores={})])
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/reference/run_directory.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "eval 0 a cat {} None",
        "rollout 10 a cat {'reward': 0.5} rollout-000010/image-0000.png",
    ]
