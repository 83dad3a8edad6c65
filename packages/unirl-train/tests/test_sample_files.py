"""Records of samples as lines and media files: what comes back, what a reader sees, what is removed when."""

import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PillowImage

from unirl.tracking import sample_files, video
from unirl.tracking.sample_files import SampleFiles, read_samples
from unirl.types.errors import ConfigError, DataError
from unirl.types.samples import Image, SampleRecord, Sound, Text, Unshown, Video


def image(seed: int = 0, size: tuple[int, int, int] = (3, 4, 6)) -> Image:
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image(pixels)


def record(number: int = 0, **fields: Any) -> SampleRecord:
    defaults: dict[str, Any] = {
        "sample_id": f"prompt:p0:sample:{number}",
        "track": "image",
        "group_id": "prompt:p0",
        "prompt_id": "prompt:p0",
        "prompt": "a cat",
        "media": image(number),
    }
    return SampleRecord(**{**defaults, **fields})


def plain(value: Any) -> Any:
    """A record or medium as values that compare."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"of": type(value).__name__, **fields}
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.flatten().tolist())
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return repr(value) if isinstance(value, float) else value


PIXELS = st.builds(image, st.integers(0, 9), st.tuples(st.just(3), st.integers(1, 5), st.integers(1, 5)))
SOUNDS = st.builds(
    lambda numbers, rate: Sound(torch.tensor(numbers).float() / 32767, rate),
    st.lists(st.integers(-32767, 32767), min_size=1, max_size=4),
    st.sampled_from((None, 8000, 44_100)),
)
MEDIA = st.one_of(
    PIXELS, SOUNDS, st.builds(Text, st.text(), st.none() | st.integers(0, 9)), st.builds(Unshown, st.text())
)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)
RECORDS = st.builds(
    SampleRecord,
    sample_id=st.text(),
    track=st.sampled_from(("image", "text")),
    group_id=st.text(),
    group_size=st.none() | st.integers(1, 99),
    group_reward_std=st.none() | NUMBERS,
    prompt_id=st.text(),
    parent_id=st.none() | st.text(),
    parent_track=st.none() | st.just("text"),
    prompt=st.text(),
    given=st.lists(MEDIA, max_size=2).map(tuple),
    drawn_from=st.none() | st.text(),
    media=st.none() | MEDIA,
    scores=st.dictionaries(st.text(), NUMBERS, max_size=2),
    error=st.none() | st.text(),
    advantage=st.none() | NUMBERS,
    policy_version=st.none() | st.integers(0, 9),
    end=st.none() | st.sampled_from(("completed", "truncated")),
    counts=st.dictionaries(st.text(), NUMBERS, max_size=2),
    metadata=st.dictionaries(st.text(), PLAIN, max_size=2),
)


@settings(max_examples=60)
@given(records=st.lists(RECORDS, max_size=3))
def test_records_come_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, records: list[SampleRecord]):
    folder = tmp_path_factory.mktemp("samples")
    SampleFiles(folder).write("rollout", 3, records)
    assert [plain(each) for each in read_samples(folder / "rollout-000003.jsonl")] == [plain(each) for each in records]
    assert len((folder / "rollout-000003.jsonl").read_bytes().split(b"\n")) == len(records) + 1


def test_a_line_says_where_its_media_lie(tmp_path: Path):
    shown = Image(image(7).pixels, "cat.png")
    records = [record(0, given=(shown,)), record(1, given=(shown,)), record(2, media=Text("yes", 3))]
    files = SampleFiles(tmp_path).write("eval", 20, records)
    first, second, third = map(json.loads, (tmp_path / "eval-000020.jsonl").read_text().splitlines())
    assert first["version"] == 1 and (first["kind"], first["step"]) == ("eval", 20)
    assert first["media"] == {"kind": "image", "file": "eval-000020/image-0000.png", "height": 4, "width": 6}
    assert first["given"] == second["given"] and first["given"][0]["source"] == "cat.png"
    assert third["media"] == {"kind": "text", "text": "yes", "num_tokens": 3}
    assert files == {each.sample_id: tmp_path / f"eval-000020/image-000{i}.png" for i, each in enumerate(records[:2])}
    assert len(list((tmp_path / "eval-000020").iterdir())) == 3


def test_videos_lie_as_files_that_play_with_their_sound_beside(tmp_path: Path):
    frames = torch.zeros(5, 3, 16, 16, dtype=torch.uint8)
    frames[:, 0] = 200
    made = Video(frames, 4.0, 5, Sound(torch.zeros(80, 2), 8000))
    SampleFiles(tmp_path).write("rollout", 1, [record(media=made)])
    (back,) = read_samples(tmp_path / "rollout-000001.jsonl")
    assert isinstance(back.media, Video) and isinstance(back.media.sound, Sound)
    assert back.media.frames.shape == frames.shape and back.media.sound.waveform.shape == (80, 2)
    assert (back.media.frames.float() - frames.float()).abs().mean() < 3  # H.264 is lossy
    with av.open(str(tmp_path / "rollout-000001" / "image-0000.mp4")) as container:
        heard = sum(frame.samples for frame in container.decode(audio=0))
        assert container.streams.audio[0].layout.name == "stereo" and heard >= 80
    line = json.loads((tmp_path / "rollout-000001.jsonl").read_text())
    assert (line["media"]["num_frames"], line["media"]["fps"]) == (5, 4.0)
    assert line["media"]["file"].endswith(".mp4") and line["media"]["sound"]["file"].endswith("-sound.wav")


def test_a_pyav_without_the_codec_leads_to_gif_and_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(video, "CODEC", "none_such")
    video._av.cache_clear()
    frames = torch.arange(4 * 3 * 8 * 8).view(4, 3, 8, 8).byte()
    with caplog.at_level(logging.WARNING):
        files = [SampleFiles(tmp_path).write("rollout", step, [record(media=Video(frames, 4.0, 4))]) for step in (1, 2)]
    video._av.cache_clear()
    assert [path.suffix for each in files for path in each.values()] == [".gif", ".gif"]
    assert len(caplog.records) == 1 and "without none_such" in caplog.text
    (back,) = read_samples(tmp_path / "rollout-000001.jsonl")
    assert isinstance(back.media, Video) and back.media.frames.shape == (4, 3, 8, 8)


def test_webp_is_smaller_and_close(tmp_path: Path):
    pixels = torch.linspace(0, 255, 64).round().byte().expand(3, 64, 64).contiguous()
    for name in ("png", "webp"):
        SampleFiles(tmp_path / name, image_format=name).write("rollout", 1, [record(media=Image(pixels))])
    (back,) = read_samples(tmp_path / "webp" / "rollout-000001.jsonl")
    assert isinstance(back.media, Image)
    assert (back.media.pixels.int() - pixels.int()).abs().float().mean() < 3
    with PillowImage.open(tmp_path / "webp" / "rollout-000001" / "image-0000.webp") as file:
        assert file.format == "WEBP"


def test_a_pillow_without_webp_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sample_files.features, "check", lambda name: False)
    with pytest.raises(ConfigError, match=r"samples.image_format = webp, which this Pillow .* Set it to png"):
        SampleFiles(tmp_path, image_format="webp")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_resumed_run_has_every_step_once_and_none_past_its_checkpoint(tmp_path: Path):
    files = SampleFiles(tmp_path)
    for step in (10, 20, 30):
        files.write("rollout", step, [record()])
    files.write("eval", 30, [record()])
    (tmp_path / "rollout-000040").mkdir()  # of a run that was killed while it wrote
    (tmp_path / "rollout-000030.png").touch()
    resumed = SampleFiles(tmp_path)
    resumed.start(20)
    assert names(tmp_path) == [
        "rollout-000010",
        "rollout-000010.jsonl",
        "rollout-000020",
        "rollout-000020.jsonl",
        "rollout-000030.png",
    ]
    resumed.write("rollout", 20, [record(1), record(2)])
    assert [each.sample_id[-1] for each in read_samples(tmp_path / "rollout-000020.jsonl")] == ["1", "2"]
    SampleFiles(tmp_path).start(None)
    assert names(tmp_path) == ["rollout-000030.png"]


def test_the_oldest_rollouts_make_room_then_evaluations_but_the_first(tmp_path: Path):
    (tmp_path / "once").mkdir()
    once = SampleFiles(tmp_path / "once")
    once.write("eval", 0, [record()])
    size = sum(path.stat().st_size for path in (tmp_path / "once").rglob("*") if path.is_file())
    kept = tmp_path / "kept"
    files = SampleFiles(kept, max_mb=3.5 * size / 1e6)
    files.write("eval", 0, [record()])
    for step in (1, 2, 3):
        files.write("rollout", step, [record()])
        files.write("eval", step, [record()])
    assert [name for name in names(kept) if name.endswith("jsonl")] == [f"eval-00000{step}.jsonl" for step in (0, 2, 3)]
    resumed = SampleFiles(kept, max_mb=0)
    resumed.start(3)
    resumed.write("rollout", 4, [record()])
    assert [name for name in names(kept) if name.endswith("jsonl")] == ["eval-000000.jsonl", "rollout-000004.jsonl"]


def failing(written: int) -> Callable[..., Any]:
    """`write_medium` on a disk that is full after some files."""
    real, calls = sample_files.write_medium, []

    def write(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > written:
            raise OSError(28, "No space left on device")
        return real(*args)

    return write


def test_a_full_disk_is_said_once_and_leaves_no_half_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    files = SampleFiles(tmp_path)
    files.write("rollout", 1, [record()])
    monkeypatch.setattr(sample_files, "write_medium", failing(1))
    assert files.write("rollout", 2, [record(0), record(1)]) == files.write("rollout", 3, [record()]) == {}
    assert len(caplog.records) == 1
    assert "samples cannot be kept: [Errno 28] No space left on device. The run continues" in caplog.text
    assert names(tmp_path) == ["rollout-000001", "rollout-000001.jsonl"]
    monkeypatch.undo()
    assert files.write("rollout", 4, [record()])


def test_another_version_of_the_format_is_refused(tmp_path: Path):
    SampleFiles(tmp_path).write("rollout", 1, [record()])
    path = tmp_path / "rollout-000001.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2, "new": 1}) + "\n")
    with pytest.raises(DataError, match="version 2 of the format, this reads 1"):
        read_samples(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}) + "\n")
    assert read_samples(path)[0].prompt == "a cat"  # a field that is new is no reason to refuse


def test_metadata_that_json_does_not_have_is_described(tmp_path: Path):
    rows = {"answer": 4, "bytes": b"1234", "path": Path("a/b"), "nan": math.nan, "half": "\ud800"}
    SampleFiles(tmp_path).write("rollout", 1, [record(metadata=rows)])
    line = json.loads((tmp_path / "rollout-000001.jsonl").read_text())
    assert line["metadata"] == {"answer": 4, "bytes": "4 bytes", "path": "a/b", "nan": "nan", "half": "\ud800"}
