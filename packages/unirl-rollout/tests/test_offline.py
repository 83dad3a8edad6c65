"""The offline engine: given images come out as a rollout, everything else is sampled."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from rollout_fakes import PARAMS, SHAPE, LinearPipeline, engine, request

from unirl.rollout.engine.offline.engine import OfflineRolloutEngine
from unirl.rollout.engine.offline.pictures import read_pictures, read_videos
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError, ContractError, DataError

GIVEN = replace(PARAMS, eta=0.0, sde_indices=[], height=3, width=3)


class EncodingPipeline(LinearPipeline):
    """Encodes images to their first two channels, and records the batch sizes."""

    def __init__(self):
        super().__init__()
        self.num_encoded = []

    def encode_media(self, media):
        self.num_encoded.append(media.batch_size)
        return media.pixels[:, :2] * 2 - 1


@pytest.fixture
def sheet(tmp_path):
    """Four images of 3 x 3 pixels in one file; channel c of image k is 60 k + 10 c."""
    values = [[60 * k + 10 * c for c in range(3)] for k in range(4)]
    picture = Image.new("RGB", (6, 6))
    for k, value in enumerate(values):
        picture.paste(tuple(value), (k % 2 * 3, k // 2 * 3, k % 2 * 3 + 3, k // 2 * 3 + 3))
    picture.save(tmp_path / "sheet.png")
    return tmp_path / "sheet.png"


def offline(**changes):
    pipeline: Any = changes.pop("pipeline", None) or EncodingPipeline()
    options: dict[str, Any] = {"forward_batch_size": 3, **changes}
    return OfflineRolloutEngine(pipeline, **options)


def pairs(sheet, **changes: Any):
    """Two groups of two; the second row of the file names its tiles in the other order."""
    ids = ["g0:sample:0", "g0:sample:1", "g1:sample:0", "g1:sample:1"]
    rows = [{"images": [f"{sheet}#0", f"{sheet}#1"]}] * 2 + [{"images": [f"{sheet}#3", f"{sheet}#2"]}] * 2
    return request(4, GIVEN).replace(**{"sample_ids": ids, "metadata": rows, **changes})


def test_given_images_come_out_as_a_rollout_in_the_order_of_their_places(sheet):
    pipeline = EncodingPipeline()
    track = offline(pipeline=pipeline).generate(pairs(sheet)).root_track()
    assert (track.decoded.pixels[:, 0, 0, 0] * 255).round().tolist() == [0, 60, 180, 120]
    assert (track.decoded.pixels[1, :, 2, 2] * 255).round().tolist() == [60, 70, 80]
    segment = track.segment
    assert torch.equal(segment.clean_latents, track.decoded.pixels[:, :2] * 2 - 1)
    unseen = offline(decode=False).generate(pairs(sheet)).root_track()
    assert unseen.decoded is None and torch.equal(unseen.segment.clean_latents, segment.clean_latents)
    assert segment.indices == [4] and segment.sde_indices == [] and segment.params == GIVEN
    assert torch.equal(segment.sigmas, pairs(sheet).sigmas)
    assert track.group_ids == ["g0", "g0", "g1", "g1"] and track.conditions["text"].batch_size == 4
    assert pipeline.num_encoded == [3, 1] and pipeline.batch_sizes == []


def test_a_shard_gets_the_images_of_its_own_samples(sheet):
    whole = offline().generate(pairs(sheet)).root_track().segment.clean_latents
    shards = [offline().generate(pairs(sheet).select(rows)).root_track() for rows in ([0], [3, 1])]
    assert torch.equal(shards[0].segment.clean_latents, whole[[0]])
    assert torch.equal(shards[1].segment.clean_latents, whole[[3, 1]])


def test_a_request_without_images_is_sampled_as_the_trainside_engine_does(sheet):
    req = request(4, GIVEN).replace(metadata=[{"category": "single"}] * 4, rollout_id=-1)
    sampled = offline(forward_batch_size=2).generate(req).root_track()
    expected = engine(pipeline=LinearPipeline()).generate(req).root_track()
    assert torch.equal(sampled.segment.clean_latents, expected.segment.clean_latents)
    assert torch.equal(sampled.decoded.pixels, expected.decoded.pixels)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rollout_id": -1}, ConfigError, "rows of eval.prompts bring images"),
        ({"sampling_params": PARAMS}, ConfigError, "no stochastic steps: sampling.eta = 0.7 must be 0"),
        ({"init_noise_latent_shape": [2, 4, 4]}, ContractError, r"the request's latents \[2, 4, 4\]"),
        ({"sampling_params": replace(GIVEN, height=6)}, DataError, "does not give an image of 6 x 3 pixels"),
    ],
)
def test_what_does_not_fit_is_refused(sheet, change, error, message):
    with pytest.raises(error, match=message):
        offline().generate(pairs(sheet).replace(**change))


def test_rows_with_and_without_images_are_not_mixed(sheet):
    rows = pairs(sheet).metadata
    with pytest.raises(ContractError, match="2 of 3 rows bring images; sample g0:sample:1 has none"):
        offline().generate(pairs(sheet, metadata=[rows[0], {}, *rows[2:]]))
    with pytest.raises(ContractError, match="does not end with :sample:"):
        offline().generate(pairs(sheet, sample_ids=["a", "b", "c", "d"]))


def test_pictures_of_other_kinds_become_rgb_and_broken_ones_are_named(tmp_path):
    Image.new("L", (3, 2), 51).save(tmp_path / "grey.png")
    Image.new("RGBA", (3, 2), (255, 0, 51, 0)).save(tmp_path / "clear.png")
    pictures = read_pictures([f"{tmp_path}/grey.png", f"{tmp_path}/clear.png"], 2, 3)
    assert pictures.shape == (2, 3, 2, 3) and pictures.dtype == torch.float32
    torch.testing.assert_close(pictures[:, :, 0, 0], torch.tensor([[0.2, 0.2, 0.2], [1.0, 0.0, 0.2]]))
    (tmp_path / "text.png").write_text("no picture")
    for name in ("text.png", "absent.png"):
        with pytest.raises(DataError, match=f"{name} cannot be read as an image"):
            read_pictures([f"{tmp_path}/{name}"], 2, 3)


def test_latents_have_the_shape_that_was_asked_for(sheet):
    assert list(offline().generate(pairs(sheet)).root_track().segment.clean_latents.shape[1:]) == list(SHAPE)


class VideoPipeline(LinearPipeline):
    """Encodes videos to the mean of their first two channels over the frames."""

    def encode_media(self, media):
        frames = media.frames.view(media.batch_size, -1, *media.frames.shape[1:])
        return frames.mean(1)[:, :2] * 2 - 1


def frames_of(folder, values):
    """A folder of images of 3 x 3 pixels, one value each."""
    folder.mkdir()
    for number, value in enumerate(values):
        Image.new("RGB", (3, 3), (value, value, value)).save(folder / f"{number}.png")
    return str(folder)


def test_given_videos_come_out_as_a_rollout(tmp_path):
    rows = [{"images": [frames_of(tmp_path / "a", [0, 51, 255])]}, {"images": [frames_of(tmp_path / "b", [51, 102])]}]
    params = replace(GIVEN, num_frames=2)
    req = request(2, params).replace(sample_ids=["g0:sample:0", "g1:sample:0"], metadata=rows)
    track = offline(pipeline=VideoPipeline()).generate(req).root_track()
    assert track.decoded.frames.shape == (4, 3, 3, 3)
    assert track.segment.clean_latents[:, 0, 0, 0].tolist() == pytest.approx([-0.8, -0.4])


def test_a_video_file_gives_its_first_frames(tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as video:
        stream = video.add_stream("libx264", rate=4, options={"qp": "0"})
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv444p"
        for value in (0, 128, 255):
            image = Image.new("RGB", (16, 16), (value, value, value))
            video.mux(stream.encode(av.VideoFrame.from_image(image).reformat(format="yuv444p")))
        video.mux(stream.encode(None))
    (frames,) = read_videos([str(path)], 2, 16, 16)
    assert frames.shape == (2, 3, 16, 16)
    assert frames.mean((1, 2, 3)).tolist() == pytest.approx([0, 128 / 255], abs=0.02)
    with pytest.raises(DataError, match="has 3 frames, and 4 are needed"):
        read_videos([str(path)], 4, 16, 16)
    with pytest.raises(DataError, match="has frames of 16 x 16 pixels .* not 8 x 8"):
        read_videos([str(path)], 2, 8, 8)


def test_a_file_that_is_no_video_is_named(tmp_path):
    pytest.importorskip("av")
    (tmp_path / "a.mp4").write_text("no video")
    with pytest.raises(DataError, match=r"a\.mp4 cannot be read as a video"):
        read_videos([str(tmp_path / "a.mp4")], 1, 8, 8)


class GuidedPipeline(EncodingPipeline):
    """A negative prompt is -1, whatever it says; the slot "pose" is the same with and without the prompt."""

    def encode(self, primitives, params):
        conditions = super().encode(primitives, params)
        conditions["pose"] = TextEmbedCondition(embeds=torch.ones_like(conditions["text"].embeds))
        if params.uses_guidance:
            assert params.negative_prompt == "bad"
            conditions["negative_text"] = TextEmbedCondition(embeds=-torch.ones_like(conditions["text"].embeds))
        return conditions


NEGATIVE_PROMPT = replace(GIVEN, negative_prompt="bad")


def many(sheet, num=400, rollout_id=3, params=NEGATIVE_PROMPT):
    return request(num, params).replace(
        sample_ids=[f"g{row}:sample:0" for row in range(num)],
        group_ids=[f"g{row}" for row in range(num)],
        metadata=[{"images": [f"{sheet}#0"]}] * num,
        rollout_id=rollout_id,
    )


def texts_of(req, dropout=0.0, **options):
    """What each sample is conditioned on, one number each."""
    given = {"forward_batch_size": 50, **options}
    dropping = offline(pipeline=GuidedPipeline(), prompt_dropout=dropout, **given)
    conditions = dropping.generate(req).root_track().conditions
    assert set(conditions) == {"text", "pose"} and bool((conditions["pose"].embeds == 1).all())
    return conditions["text"].embeds.flatten()


def test_a_share_of_the_prompts_is_replaced_by_the_negative_one(sheet):
    req = many(sheet)
    kept, dropped = texts_of(req), texts_of(req, 0.3)
    is_dropped = dropped == -1
    assert is_dropped.float().mean().item() == pytest.approx(0.3, abs=0.07)  # three standard errors
    assert torch.equal(dropped[~is_dropped], kept[~is_dropped]) and bool((kept > 0).all())


def test_which_prompts_are_dropped_depends_on_the_sample_alone(sheet):
    req = many(sheet, 60)
    whole = texts_of(req, 0.5)
    rows = [51, 3, 17]
    assert torch.equal(texts_of(req.select(rows), 0.5, forward_batch_size=2), whole[rows])
    assert not torch.equal(texts_of(many(sheet, 60, rollout_id=4), 0.5), whole), "another rollout draws anew"
    reseeded = many(sheet, 60, params=replace(NEGATIVE_PROMPT, seed=4))
    assert not torch.equal(texts_of(reseeded, 0.5), whole)
    pairs_of = req.replace(group_ids=[f"g{row // 2}" for row in range(60)])
    both = texts_of(pairs_of, 0.5).view(30, 2) == -1
    assert torch.equal(both[:, 0], both[:, 1]), "the images of a prompt are dropped together"


def test_prompts_are_dropped_only_where_guidance_compares_with_a_negative_one(sheet):
    with pytest.raises(ConfigError, match="engine.prompt_dropout = 0.5 replaces prompts by sampling.negative_prompt"):
        texts_of(many(sheet, 8, params=GIVEN), 0.5)
    distilled = replace(NEGATIVE_PROMPT, distilled_guidance_scale=3.5)
    with pytest.raises(ConfigError, match=r"takes its guidance as an input \(sampling.distilled_guidance_scale = 3.5"):
        texts_of(many(sheet, 8, params=distilled), 0.5)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"prompt_dropout = .* must .*\[0, 1\)"):
            offline(prompt_dropout=share)


def test_encoders_read_the_negative_prompt_before_they_are_dropped(sheet):
    pipeline = GuidedPipeline()
    seen = []
    pipeline.encode_texts = lambda primitives, params: seen.append((params.uses_guidance, params.negative_prompt))
    for dropout in (0.0, 0.5):
        engine_of = offline(pipeline=pipeline, prompt_dropout=dropout)
        engine_of.encode_ahead({}, NEGATIVE_PROMPT)
    assert seen == [(False, "bad"), (True, "bad")]
