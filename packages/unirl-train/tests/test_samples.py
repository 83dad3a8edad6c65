"""Which samples are recorded, what a record says, and how records are drawn: chains of any number of tracks."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PillowImage

from unirl.distributed.runtime import LocalRuntime
from unirl.tracking.base import TableRow
from unirl.tracking.gallery import Gallery, sheet
from unirl.tracking.sample_files import SampleFiles, read_samples
from unirl.trainer.samples import Taken, first_roots, take, take_samples, whole_groups
from unirl.types.media import Audios, Embeddings, ImageLists, Images, SizedImages, Texts, Videos
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.samples import Image, Sound, Text, Unshown, Video
from unirl.types.segments import SegmentStatus, TextSegment

NUM_PROMPTS, NUM_TEXTS, NUM_DRAFTS, NUM_IMAGES = 2, 3, 2, 2


def images(num: int, side: int = 4) -> Images:
    return Images(pixels=torch.arange(num).view(num, 1, 1, 1).expand(num, 3, side, side) / 255)


def chain() -> RolloutResp:
    """Texts of prompts, drafts of the texts, images of the drafts."""
    num = NUM_PROMPTS * NUM_TEXTS
    groups = [f"prompt:p{i}" for i in range(NUM_PROMPTS) for _ in range(NUM_TEXTS)]
    status = [SegmentStatus.COMPLETED] * (num - 1) + [SegmentStatus.TRUNCATED]
    text = RolloutTrack(
        sample_ids=[f"{group}:sample:{i % NUM_TEXTS}" for i, group in enumerate(groups)],
        parent_ids=groups,
        primitives={
            "text": Texts(texts=[f"ask {group}" for group in groups]),
            "image": ImageLists(images=[[torch.ones(3, 2, 2)]] * num, sources=[("a.png",)] * num),
            "audio": Audios.pack(waveform=[torch.zeros(i) for i in range(num)], sample_rate=16_000),
        },
        metadata=[{"answer": i} for i in range(num)],
        segment=TextSegment.pack(
            tokens=[torch.zeros(i + 1, dtype=torch.long) for i in range(num)], status=torch.tensor(status)
        ),
        decoded=Texts(texts=[f"text {i}" for i in range(num)]),
        rewards=torch.arange(num).float(),
        component_rewards={"part": torch.arange(num).float() / 2},
        reward_errors=[None] * num,
        advantages=torch.arange(num).float() - 1,
        policy_versions=torch.full((num,), 7),
        counts={"fallback": torch.zeros(num)},
    )
    draft = text.fork("text", "draft", NUM_DRAFTS, decoded=images(num * NUM_DRAFTS)).replace(
        primitives={"text": Texts(texts=[f"text {i}" for i in range(num) for _ in range(NUM_DRAFTS)])}
    )
    final = draft.fork("draft", "final", NUM_IMAGES, decoded=images(num * NUM_DRAFTS * NUM_IMAGES))
    return RolloutResp(tracks={"text": text, "draft": draft, "final": final})


class Holder:
    """Makes a response where it will lie."""

    def __init__(self, resp: RolloutResp) -> None:
        self.resp = resp

    @distributed(Dispatch.BROADCAST, Collect.HOLD)
    def make(self) -> RolloutResp:
        return self.resp


def taken(resp: RolloutResp, roots: Sequence[str], **options: Any) -> Taken:
    runtime = LocalRuntime(lambda context: {"engine": Holder(resp)})
    role: Any = runtime.role("engine")
    with role.make() as held:
        return take(held, roots, **options)


def test_a_record_of_each_track_knows_its_prompt_its_parent_and_its_group():
    resp = chain()
    chosen = [resp.tracks["text"].sample_ids[4], resp.tracks["text"].sample_ids[1]]
    found = taken(resp, chosen)
    assert list(found) == chosen
    text, *children = found[chosen[0]]
    assert [each.track for each in children] == ["draft"] * 2 + ["final"] * 4
    assert (text.prompt, text.prompt_id, text.group_id) == ("ask prompt:p1", "prompt:p1", "prompt:p1")
    assert (text.parent_id, text.parent_track, text.drawn_from) == (None, None, None)
    assert text.media == Text("text 4", 5) and text.end == "completed" and text.policy_version == 7
    assert text.scores == {"reward": 4.0, "part": 2.0} and text.advantage == 3.0 and text.metadata == {"answer": 4}
    assert text.group_size == NUM_TEXTS and text.group_reward_std == pytest.approx((2 / 3) ** 0.5)
    assert text.counts == {"fallback": 0.0}
    shown, heard = text.given
    assert isinstance(shown, Image) and shown.source == "a.png" and shown.pixels.unique().tolist() == [255]
    assert isinstance(heard, Sound) and len(heard.waveform) == 4 and heard.rate == 16_000
    draft, final = children[0], children[-1]
    assert draft.drawn_from == "text 4" and draft.parent_id == text.sample_id == draft.group_id
    assert final.parent_track == "draft" and final.parent_id == children[1].sample_id and final.drawn_from is None
    for child in children:
        assert (child.prompt, child.prompt_id, child.metadata) == ("ask prompt:p1", "prompt:p1", {"answer": 4})
        assert child.scores == {} and child.advantage is None and child.group_reward_std is None
    assert isinstance(final.media, Image)
    assert int(final.media.pixels.unique()) == resp.tracks["final"].sample_ids.index(final.sample_id)


def test_the_first_sample_of_a_prompt_has_no_sound_where_it_brings_none():
    (text, *_) = taken(chain(), ["prompt:p0:sample:0"])["prompt:p0:sample:0"]
    assert [type(each) for each in text.given] == [Image]


def test_records_hold_no_view_of_the_batch():
    for decoded in (images(6).in_bytes(), SizedImages(images=list(images(6).in_bytes().pixels))):
        track = RolloutTrack(sample_ids=list("abcdef"), decoded=decoded)
        ((record,),) = take_samples(RolloutResp(tracks={"image": track}), ["c"], []).values()
        assert isinstance(record.media, Image)
        assert record.media.pixels.untyped_storage().nbytes() == 3 * 4 * 4


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), branch=st.integers(1, 3), most=st.integers(0, 12))
def test_groups_are_whole_where_the_first_fits(sizes: list[int], branch: int, most: int):
    groups = [f"g{i}" for i, size in enumerate(sizes) for _ in range(size)]
    text = RolloutTrack(sample_ids=[str(i) for i in range(len(groups))], parent_ids=groups)
    resp = RolloutResp(tracks={"text": text, "image": text.fork("text", "image", branch)})
    chosen = whole_groups(resp, most)
    assert chosen == text.sample_ids[: len(chosen)]
    if most >= sizes[0] * branch:
        counts = [sum(groups[int(sample)] == f"g{i}" for sample in chosen) for i in range(len(sizes))]
        assert all(count in (0, size) for count, size in zip(counts, sizes, strict=True))
        assert len(chosen) * branch <= most
    else:
        assert chosen == first_roots(resp, most) == text.sample_ids[: -(-most // branch)]


def test_videos_are_taken_whole_or_as_an_excerpt_that_shows_the_same_strip():
    frames = [torch.rand(length, 3, 4, 4) for length in (9, 20, 3)]
    sounds = Audios.pack(waveform=[torch.zeros(8, 2)] * 3, sample_rate=8000)
    track = RolloutTrack(sample_ids=list("abc"), decoded=Videos.pack(frames=frames, fps=4.0, audio=sounds))
    resp = RolloutResp(tracks={"video": track})
    whole, few = (
        [records[0] for records in taken(resp, list("abc"), whole=ids).values()] for ids in (list("abc"), ["a"])
    )
    media = [each.media for each in few]
    assert [(len(each.frames), each.num_frames, each.is_excerpt) for each in media if isinstance(each, Video)] == [
        (9, 9, False),
        (6, 20, True),
        (3, 3, False),
    ]
    assert torch.equal(sheet(few), sheet(whole))
    assert isinstance(media[0], Video) and media[0].sound is not None and media[0].sound.waveform.shape == (8, 2)


@pytest.mark.parametrize(("lengths", "num_shown"), [((5, 5), 5), ((3, 5), 5), ((9, 20), 6)])
def test_a_strip_shows_no_frame_twice_unless_a_video_is_shorter_than_others(lengths: tuple[int, ...], num_shown: int):
    videos = [torch.linspace(0, 1, length).view(length, 1, 1, 1).expand(length, 3, 4, 4) for length in lengths]
    track = RolloutTrack(sample_ids=list("ab"), decoded=Videos.pack(frames=videos, fps=4.0))
    strips = sheet([each for records in taken(RolloutResp(tracks={"video": track}), "ab").values() for each in records])
    assert strips.shape == (2, 3, 4, num_shown * 4)
    assert len(strips[-1, 0, 0].unique()) == num_shown


def test_images_of_several_sizes_are_recorded_as_they_are_and_shown_whole_in_one_size():
    decoded = SizedImages(images=[torch.zeros(3, 4, 8), torch.full((3, 8, 4), 51, dtype=torch.uint8)])
    track = RolloutTrack(sample_ids=list("ab"), decoded=decoded)
    records = [each for own in taken(RolloutResp(tracks={"image": track}), "ab").values() for each in own]
    assert [each.media.pixels.shape for each in records if isinstance(each.media, Image)] == [(3, 4, 8), (3, 8, 4)]
    wide = torch.ones(3, 8, 8).index_fill(1, torch.arange(2, 6), 0.0)
    high = torch.ones(3, 8, 8).index_fill(2, torch.arange(2, 6), 0.2)
    torch.testing.assert_close(sheet(records), torch.stack([wide, high]))


class Notes:
    """A tracker that keeps what it is shown."""

    def __init__(self) -> None:
        self.images: dict[tuple[str, int], list[str]] = {}
        self.tables: dict[tuple[str, int], list[TableRow]] = {}
        self.sounds: dict[tuple[str, int], list[tuple[str, str]]] = {}

    def start(self, config: Mapping[str, Any], run_dir: Path, step: int) -> None: ...

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def image(self, name: str, picture: PillowImage.Image, step: int, captions: Sequence[str]) -> None:
        self.images[name, step] = list(captions)

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None: ...

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        self.sounds[name, step] = [(file.name, text) for file, text in zip(files, captions, strict=True)]

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        self.tables[name, step] = list(rows)

    def alert(self, name: str, text: str, step: int) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def test_a_chain_shows_its_last_images_and_those_in_between_by_track(tmp_path: Path):
    resp, notes = chain(), Notes()
    records = [each for own in taken(resp, resp.tracks["text"].sample_ids[:2]).values() for each in own]
    Gallery(tmp_path, [notes], "reward").show("rollout", 3, records, {}, most=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout-000003.png", "rollout-draft-000003.png"]
    assert [len(captions) for captions in notes.images.values()] == [3, 3] and not notes.tables
    assert notes.images["rollout-draft", 3][0] == "ask prompt:p0: text 0: no score"


def test_lines_of_a_chain_lead_from_an_image_to_its_text(tmp_path: Path):
    resp = chain()
    roots = whole_groups(resp, NUM_TEXTS * NUM_DRAFTS * NUM_IMAGES)
    records = [each for own in taken(resp, roots).values() for each in own]
    SampleFiles(tmp_path).write("rollout", 1, records)
    lines = [json.loads(line) for line in (tmp_path / "rollout-000001.jsonl").read_text().splitlines()]
    by_id = {line["sample_id"]: line for line in lines}
    final = lines[-1]
    draft = by_id[final["parent_id"]]
    assert by_id[draft["parent_id"]]["media"]["text"] == "text 2" and len(lines) == 3 * (1 + 2 + 4)
    assert len(read_samples(tmp_path / "rollout-000001.jsonl")) == len(lines)


def test_media_of_an_unknown_kind_are_recorded_without_a_file_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    track = RolloutTrack(sample_ids=["a"], decoded=Embeddings(embeds=torch.zeros(1, 3)), rewards=torch.ones(1))
    (records,) = taken(RolloutResp(tracks={"plan": track}), ["a"]).values()
    assert records[0].media == Unshown("Embeddings") and records[0].scores == {"reward": 1.0}
    gallery = Gallery(tmp_path, [Notes()], "reward")
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            gallery.show("rollout", step, records, SampleFiles(tmp_path).write("rollout", step, records))
    assert [each.message for each in caplog.records] == [
        "track plan holds Embeddings, which is neither shown nor written as a file"
    ]
    assert read_samples(tmp_path / "rollout-000002.jsonl")[0].media == Unshown("Embeddings")


def test_a_folder_that_cannot_be_written_is_said_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "samples").write_text("a file where the folder should be")
    track = RolloutTrack(sample_ids=["a"], decoded=images(1), rewards=torch.ones(1))
    (records,) = taken(RolloutResp(tracks={"image": track}), ["a"]).values()
    notes = Notes()
    files = SampleFiles(tmp_path / "samples").write("eval", 0, records)
    Gallery(tmp_path / "samples", [notes], "reward").show("eval", 0, records, files)
    assert files == {} and list(notes.images) == [("eval", 0)]  # trackers still get their image
    assert "samples cannot be kept" in caplog.text and "eval-000000.png cannot be written" in caplog.text


def test_sounds_reach_the_trackers_as_files(tmp_path: Path):
    heard = Audios.pack(waveform=[torch.zeros(8)] * 6, sample_rate=8000)
    track = RolloutTrack(sample_ids=list("abcdef"), decoded=heard, rewards=torch.arange(6.0))
    records = [each for own in taken(RolloutResp(tracks={"sound": track}), "abcdef").values() for each in own]
    notes, files = Notes(), SampleFiles(tmp_path).write("rollout", 2, records)
    Gallery(tmp_path, [notes], "reward").show("rollout", 2, records, files)
    assert notes.sounds == {("rollout", 2): [(f"sound-000{i}.wav", f": reward {i}") for i in range(4)]}
