"""The bodies of the reward server: what is sent is what arrives, and nothing else is read."""

import base64
import dataclasses
import json
import math
import struct
import tracemalloc
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from unirl.reward.local.pixels import to_bytes
from unirl.reward.wire import (
    Limits,
    SampleAnswer,
    SchemaError,
    WireSample,
    batch_key,
    decode_answer,
    decode_binary,
    decode_json,
    encode_answer,
    encode_binary,
    encode_json,
    request_of,
    samples_of,
    sub_metrics,
)
from unirl.types.errors import ConfigError, ContractError, DataError
from unirl.types.media import Audios, Images, Texts, Videos
from unirl.types.reward import RewardRequest, RewardResponse

LIMITS = Limits(max_samples=8, max_pixels=400, max_frames=6, max_media_bytes=20_000, max_text_chars=100, max_sound_s=3)


def byte_pixels(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).float() / 255


def binary(samples, rewards):
    return b"".join(encode_binary(samples, rewards))


texts = st.text(max_size=12)
values = (
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
rows = st.none() | st.dictionaries(texts, values | st.lists(values, max_size=3), max_size=3)


@st.composite
def requests(draw):
    """Any request that travels: images, videos or texts, with or without an input image, ids and groups."""
    num = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 1000))
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["image", "video", "text"]))
    if kind == "image":
        made = Images(pixels=byte_pixels(num, 3, height, width, seed=seed))
    elif kind == "video":
        lengths = [draw(st.integers(1, 4)) for _ in range(num)]
        # Equal neighbours are what a clever encoder would join.
        frames = [byte_pixels(1, 3, height, width, seed=seed).repeat(length, 1, 1, 1) for length in lengths]
        frames[0][-1] = byte_pixels(3, height, width, seed=seed + 1)
        made = Videos.pack(frames=frames, fps=draw(st.sampled_from([None, 8.0, 23.976])))
    else:
        made = Texts(texts=[draw(texts) for _ in range(num)])
    primitives = {"text": Texts(texts=[draw(texts) for _ in range(num)])}
    if draw(st.booleans()):
        primitives["image"] = Images(pixels=byte_pixels(num, 3, 4, 5, seed=seed + 2))
    return RewardRequest(
        sample_ids=[f"{i}{draw(texts)}" for i in range(num)],
        group_ids=draw(st.sampled_from([[], ["g"] * num])),
        primitives=primitives,
        generated={kind: made},
        metadata=[draw(rows) for _ in range(num)],
    )


def assert_equal_requests(a, b):
    assert (a.sample_ids, a.group_ids, a.metadata) == (b.sample_ids, b.group_ids, b.metadata)
    for left, right in ((a.primitives, b.primitives), (a.generated, b.generated)):
        assert list(left) == list(right)
        for name, media in left.items():
            other = right[name]
            assert type(media) is type(other)
            if isinstance(media, Texts):
                assert media.texts == other.texts
            elif isinstance(media, Images):
                assert torch.equal(media.pixels, other.pixels)
            else:
                # Frames may come as bytes.
                assert torch.equal(media.in_floats().frames, other.in_floats().frames) and media.fps == other.fps
                assert torch.equal(media.cu_seqlens, other.cu_seqlens)


@settings(max_examples=40, deadline=None)
@given(requests())
def test_a_request_arrives_bit_for_bit_through_both_bodies(request_):
    samples = samples_of(request_)
    for call in (
        decode_binary(binary(samples, ["a", "b"]), LIMITS),
        decode_json(encode_json(samples, ["a", "b"]), LIMITS),
    ):
        assert call.rewards == [("a", "b")] * len(samples)
        assert_equal_requests(request_of(call.samples), request_)


@st.composite
def sounding(draw):
    """Videos with sounds of any values and lengths, mono or of several channels, some empty."""
    bits = st.integers(-(2**31), 2**31 - 1)
    channels = draw(st.sampled_from([None, 1, 2]))
    sounds = []
    for _ in range(draw(st.integers(1, 3))):
        words = draw(st.lists(bits, max_size=6))
        words = words[: len(words) // (channels or 1) * (channels or 1)]
        shape = (-1,) if channels is None else (len(words) // channels, channels)
        sounds.append(torch.tensor(words, dtype=torch.int32).view(torch.float32).reshape(shape))
    audio = Audios.pack(waveform=sounds).replace(sample_rate=draw(st.sampled_from([None, 7, 24_000, 44_100])))
    frames = [torch.zeros(2, 3, 2, 3) for _ in sounds]
    return RewardRequest(
        sample_ids=[str(i) for i in range(len(sounds))],
        generated={"video": Videos.pack(frames=frames, fps=8.0).replace(audio=audio)},
    )


@settings(max_examples=60, deadline=None)
@given(sounding())
def test_sounds_arrive_bit_for_bit_with_their_rate(request_):
    call = decode_binary(binary(samples_of(request_, pixels="uint8"), ["a"]), LIMITS)
    sent, arrived = request_.generated["video"], request_of(call.samples).generated["video"]
    assert isinstance(sent, Videos) and isinstance(arrived, Videos) and sent.audio and arrived.audio
    assert arrived.audio.sample_rate == sent.audio.sample_rate
    assert torch.equal(arrived.audio.cu_seqlens, sent.audio.cu_seqlens)
    left, right = arrived.audio.waveform, sent.audio.waveform
    assert left.shape == right.shape and torch.equal(left.view(torch.int32), right.view(torch.int32))


def video_with_sound(sound, rate=8_000):
    return RewardRequest(
        sample_ids=["s0"],
        generated={
            "video": Videos.pack(frames=[torch.zeros(2, 3, 2, 2)], fps=8.0).replace(
                audio=Audios.pack(waveform=[sound]).replace(sample_rate=rate)
            )
        },
    )


def test_half_precision_sounds_arrive_as_the_same_numbers_and_longer_ones_are_refused():
    sound = torch.linspace(-1, 1, 50).to(torch.bfloat16)
    [sample] = decode_binary(binary(samples_of(video_with_sound(sound)), ["a"]), LIMITS).samples
    assert isinstance(sample.sound, np.ndarray) and np.array_equal(sample.sound, sound.float().numpy())
    assert sample.num_bytes == 2 * 2 * 2 * 3 + 50 * 4
    with pytest.raises(ContractError, match="sample s0: its sound is torch.float64; sounds travel as float32"):
        samples_of(video_with_sound(sound.double()))


def test_a_body_with_sound_is_one_that_readers_without_sounds_refuse_and_json_has_none():
    samples = samples_of(video_with_sound(torch.zeros(5)))
    silent = [dataclasses.replace(sample, sound=None, sample_rate=None) for sample in samples]
    versions = []
    for sent in (samples, silent):
        body = binary(sent, ["a"])
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        versions.append(json.loads(header["__metadata__"]["unirl_score"])["version"])
    assert versions == [2, 1] and batch_key(samples[0]) != batch_key(silent[0])
    with pytest.raises(ContractError, match="sample s0: JSON carries no sound of a video. Send it in the binary body"):
        encode_json(samples, ["a"])


@settings(max_examples=20, deadline=None)
@given(requests() | sounding(), st.data())
def test_a_cut_or_changed_binary_body_is_refused_or_read_but_never_crashes(request_, data):
    body = bytearray(binary(samples_of(request_), ["a"]))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body) - 1)) :]
        with pytest.raises(DataError):
            decode_binary(bytes(body), LIMITS)
        return
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_binary(bytes(body), LIMITS)
    except DataError as error:
        assert str(error)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200) | st.recursive(values, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)))
def test_any_other_body_is_refused_by_both_readers(content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    for read in (decode_json, decode_binary):
        with pytest.raises(DataError):
            read(body, LIMITS)


def test_every_byte_becomes_the_float_that_torch_divides_it_to():
    every = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    [pixels] = request_of([WireSample(id="a", kind="image", media=every)]).pixels
    assert torch.equal(pixels, torch.from_numpy(every).permute(2, 0, 1).float().div(255))


@pytest.mark.parametrize(
    "text",
    [
        rb'{"whole": 123456789012345678901234567890, "least": 5e-324, "tiny": 1e-400, "zero": -0.0}',
        rb'{"half of a pair": "\ud800", "pair": "\ud83d\ude00", "nul": "\u0000", "slash": "\/"}',
        rb'{"twice": 1, "twice": 2, "huge": 1e999}',
        b'{"half of a pair": "\xed\xa0\x80"}',
        b"[" * 500 + b"]" * 500,
    ],
)
def test_metadata_is_read_as_the_standard_library_reads_it(text):
    turn = b'{"requests": [{"history": [{"completion": "c"}], "required_rewards": ["r"], "metadata": {"inner": %s}}]}'
    [sample] = decode_json(memoryview(bytearray(turn % text)), LIMITS).samples
    assert repr(sample.metadata) == repr({"inner": json.loads(text)})  # of equal texts also -0.0 is -0.0


@pytest.mark.parametrize("padding", ["", "=", "=="])
def test_more_padding_than_base64_needs_does_no_harm(padding):
    data = noise()
    data += b"\0" * (-len(data) % 3)  # after the end of the image; so it needs no padding
    [sample] = decode_json(json.dumps(image_body(b64(data) + padding)).encode(), LIMITS).samples
    assert isinstance(sample.media, np.ndarray) and sample.media.shape == (19, 19, 3)


def test_pixels_that_bytes_would_round_travel_as_floats_unless_rounding_is_meant():
    pixels = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    request = RewardRequest(sample_ids=["a", "b"], generated={"image": Images(pixels=pixels)})
    [arrived] = [request_of(decode_binary(binary(samples_of(request), ["r"]), LIMITS).samples)]
    assert torch.equal(arrived.pixels, pixels) and not arrived.primitives
    with pytest.raises(ContractError, match="would round its float32 pixels"):
        encode_json(samples_of(request), ["r"])
    kept = samples_of(request.replace(generated={"image": Images(pixels=pixels).in_bytes()}))
    kept = request_of(decode_json(encode_json(kept, ["r"]), LIMITS).samples)
    assert np.array_equal(to_bytes(kept.pixels), to_bytes(pixels))
    rounded = samples_of(request, pixels="uint8")
    for call in (decode_json(encode_json(rounded, ["r"]), LIMITS), decode_binary(binary(rounded, ["r"]), LIMITS)):
        assert np.array_equal(to_bytes(request_of(call.samples).pixels), to_bytes(pixels))


def test_any_safetensors_library_reads_and_writes_the_binary_body(tmp_path):
    request = RewardRequest(
        sample_ids=["a", "b"],
        primitives={"text": Texts(texts=["x", "y"])},
        generated={"image": Images(pixels=byte_pixels(2, 3, 4, 5))},
    )
    body = binary(samples_of(request), ["r"])
    path = tmp_path / "body.safetensors"
    path.write_bytes(body)
    with safetensors.safe_open(path, "np") as file:
        assert np.array_equal(file.get_tensor("media.1"), to_bytes(request.pixels)[1])
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    call = decode_binary(safetensors.numpy.save(tensors, metadata), LIMITS)
    assert torch.equal(request_of(call.samples).pixels, request.pixels) and call.samples[1].prompt == "y"


def test_the_published_json_of_an_edit_and_of_several_sizes_is_read():
    def picture(width, height, **options):
        buffer = BytesIO()
        Image.new("RGB", (width, height), (200, 30, 40)).save(buffer, **options)
        return base64.b64encode(buffer.getvalue()).decode()

    body = {
        "requests": [
            {
                "history": [
                    {"text": "make it red", "image_b64": picture(4, 3, format="PNG")},
                    {"text": "", "image_b64": picture(6, 5, format="JPEG", quality=95)},
                ],
                "required_rewards": ["edit", "clip"],
                "metadata": {"answer": 3},
            },
            {"history": [{"text": "a", "image_b64": picture(2, 2, format="WEBP")}], "required_rewards": ["clip"]},
        ]
    }
    call = decode_json(json.dumps(body).encode(), LIMITS)
    edit, plain = call.samples
    assert call.rewards == [("edit", "clip"), ("clip",)] and batch_key(edit) != batch_key(plain)
    assert isinstance(edit.media, np.ndarray) and edit.source is not None
    assert (edit.prompt, edit.source.shape, edit.media.shape) == ("make it red", (3, 4, 3), (5, 6, 3))
    assert edit.metadata == {"answer": 3} and plain.source is None and plain.id == "1"
    with pytest.raises(ContractError, match="2 samples of 2 shapes"):
        request_of(call.samples)


def animation(num_frames, size, kind):
    buffer = BytesIO()
    first, *rest = [Image.new("RGB", size, (90 * (i % 2), 0, i)) for i in range(num_frames)]
    first.save(buffer, kind, save_all=True, append_images=rest)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["WEBP", "PNG", "GIF"])
def test_a_small_animation_is_held_once_and_one_that_is_too_long_is_not_decoded(kind):
    data = animation(48, (256, 192), kind)
    decoded_bytes = 48 * 256 * 192 * 3
    assert len(data) < decoded_bytes / 100
    body = video_body(video_b64=base64.b64encode(data).decode())
    tracemalloc.start()
    try:
        [sample] = decode_json(body, Limits()).samples
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with pytest.raises(DataError, match="more than max_frames = 40"):
            decode_json(body, Limits(max_frames=40))
        _, refused_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(sample.media, np.ndarray) and sample.media.shape == (48, 192, 256, 3)
    assert sample.media[3, 0, 0, 0] > 60 > sample.media[2, 0, 0, 0]
    assert peak < 1.3 * decoded_bytes
    if kind != "GIF":  # its header does not say how many frames there are
        assert refused_peak - before < 0.1 * decoded_bytes


def test_an_animation_is_no_image():
    text = base64.b64encode(animation(2, (8, 8), "WEBP")).decode()
    with pytest.raises(DataError, match=r"history\[0\].image_b64 is an animation; send it as video_b64"):
        decode_json(json.dumps(image_body(text)).encode(), LIMITS)


def test_frames_that_came_as_bytes_stay_bytes_until_they_are_scored():
    frames = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
    request = request_of([WireSample(id=name, kind="video", media=frames) for name in "ab"])
    videos = request.generated["video"]
    assert isinstance(videos, Videos) and videos.frames.dtype == torch.uint8 and videos.frames.is_contiguous()
    expected = torch.from_numpy(np.moveaxis(frames.astype(np.float32) / np.float32(255), -1, 1))
    assert torch.equal(videos.in_floats().frames, torch.cat([expected, expected]))
    mixed = [
        WireSample(id=str(i), kind="video", media=media) for i, media in enumerate((frames, frames / np.float32(300)))
    ]
    found = request_of(mixed).generated["video"]
    assert isinstance(found, Videos) and found.frames.dtype == torch.float32 and torch.equal(found.frames[:2], expected)


def mp4(num_frames, size=(32, 16), rate=8):
    av: Any = pytest.importorskip("av")
    buffer = BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), 40 * i, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def video_body(**turn):
    return json.dumps({"requests": [{"history": [{"text": "a", **turn}], "required_rewards": ["v"]}]}).encode()


def test_mp4_is_read_with_its_frame_rate_and_within_limits():
    limits = Limits(max_pixels=512, max_frames=4)
    data = mp4(4)
    text = base64.b64encode(data).decode()
    [sample] = decode_json(video_body(video_b64=text), limits).samples
    assert isinstance(sample.media, np.ndarray) and sample.media.shape == (4, 16, 32, 3) and sample.fps == 8.0
    assert np.abs(sample.media.mean((1, 2, 3)) - [0, 40, 80, 120]).max() < 4
    [same] = decode_json(video_body(video_path="clips/a.mp4"), limits, lambda path: {"clips/a.mp4": data}[path]).samples
    assert isinstance(same.media, np.ndarray) and np.array_equal(same.media, sample.media)
    for changed, message in (
        (Limits(max_pixels=511), "32 x 16; it must have 1 to 511"),
        (Limits(max_frames=3), "more than max_frames = 3"),
        (Limits(max_media_bytes=4000), "more than max_media_bytes = 4000"),
    ):
        with pytest.raises(DataError, match=message):
            decode_json(video_body(video_b64=text), changed)
    for broken in (data[:200], data[: len(data) // 2], b"no video at all"):
        with pytest.raises(DataError, match="is not a video|no video stream|has no frames"):
            decode_json(video_body(video_b64=base64.b64encode(broken).decode()), limits)
    with pytest.raises(DataError, match="this server reads no files"):
        decode_json(video_body(video_path="clips/a.mp4"), limits)


def video_with_track(sound, rate=8_000, kind="matroska", codec="pcm_f32le"):
    """A video of four frames and a second stream with a sound [L, C]."""
    av: Any = pytest.importorskip("av")
    buffer = BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        layout = "mono" if sound.shape[1] == 1 else "stereo"
        track = container.add_stream(codec, rate=rate, layout=layout)
        for i in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), 40 * i, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        part = av.AudioFrame.from_ndarray(sound.reshape(1, -1), format="flt", layout=layout)
        part.sample_rate = rate
        for each in (stream.encode(), track.encode(part), track.encode()):
            container.mux(each)
    return buffer.getvalue()


@pytest.mark.parametrize("channels", [1, 2])
def test_the_sound_of_a_file_in_json_is_read_with_its_rate_and_within_limits(channels):
    sound = np.random.default_rng(0).uniform(-1, 1, (6_000, channels)).astype(np.float32)
    body = video_body(video_b64=b64(video_with_track(sound)))
    [sample] = decode_json(body, Limits()).samples
    assert isinstance(sample.media, np.ndarray) and sample.media.shape == (4, 16, 32, 3) and sample.fps == 8.0
    assert isinstance(sample.sound, np.ndarray) and np.array_equal(sample.sound, sound) and sample.sample_rate == 8_000
    videos = request_of([sample]).generated["video"]
    assert isinstance(videos, Videos) and videos.audio is not None and videos.audio.waveform.shape == (6_000, channels)
    num_bytes = 4 * 16 * 32 * 3 + sound.nbytes
    decode_json(body, Limits(max_media_bytes=num_bytes, max_sound_s=0.75))
    for limits, message in (
        (Limits(max_sound_s=0.5), r"the sound of .*video_b64 lasts 0\.\d+ s; the limit is max_sound_s = 0.5"),
        (Limits(max_media_bytes=num_bytes - 1), "more than max_media_bytes"),
    ):
        with pytest.raises(DataError, match=message):
            decode_json(body, limits)
    unknown = video_with_track(sound).replace(b"A_PCM/FLOAT/IEEE", b"A_PCM/FLOAT/NONE")
    with pytest.raises(DataError, match="the sound of .*video_b64 cannot be decoded: its codec is unknown. Encode it"):
        decode_json(video_body(video_b64=b64(unknown)), Limits())
    [silent] = decode_json(video_body(video_b64=b64(mp4(2))), Limits()).samples
    assert silent.sound is None and silent.sample_rate is None
    aac = video_with_track(sound, kind="mp4", codec="aac")
    [sample] = decode_json(video_body(video_b64=b64(aac)), Limits()).samples
    assert isinstance(sample.sound, np.ndarray) and abs(len(sample.sound) - 6_000) <= 2 * 1024


def b64(data):
    return base64.b64encode(data).decode()


def png_claiming(width, height):
    """A PNG whose header claims a size that its data do not have."""
    buffer = BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "PNG")
    data = buffer.getvalue()
    header = data[12:16] + struct.pack(">II", width, height) + data[24:29]
    crc = struct.pack(">I", __import__("zlib").crc32(header))
    return data[:12] + header + crc + data[33:]


def image_body(text, **entry):
    turn = {"text": "a", "image_b64": text}
    return {"requests": [{"history": [turn], "required_rewards": ["r"], **entry}]}


def saved(mode, size=(2, 2)):
    buffer = BytesIO()
    Image.new(mode, size).save(buffer, "PNG")
    return buffer.getvalue()


def noise():
    buffer = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (19, 19, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{", SchemaError, "the body is not JSON"),
        (b'{"requests": [NaN]}', SchemaError, "NaN is not a JSON number"),
        (b"[" * 50_000, SchemaError, "the body is not JSON"),
        (b"[" * 2_000_000, SchemaError, "max_json_nodes = 1000000"),
        ([], SchemaError, "the body must be an object, got list"),
        ({}, SchemaError, "the body has no requests"),
        ({"requests": []}, DataError, "requests has 0 entries; 1 to 8"),
        ({"requests": [3]}, SchemaError, r"requests\[0\] must be an object, got int"),
        ({"requests": [{"history": []}]}, DataError, r"history has 0 turns"),
        (image_body("!"), DataError, r"history\[0\].image_b64 is not base64"),
        (image_body("AAAA"), DataError, "is not a PNG, JPEG, WEBP file"),
        (image_body(b64(noise()[:300])), DataError, "is damaged"),
        (image_body(b64(saved("RGB", (21, 20)))), DataError, "is 21 x 20; it must have 1 to 400 pixels"),
        (image_body(b64(png_claiming(40_000, 40_000))), DataError, "pixels"),
        (image_body(b64(saved("I;16"))), DataError, "has mode I;16; send 8 bits"),
        (image_body(None), DataError, "exactly one of image_b64, .*, completion, audio_b64; it has"),
        (image_body(b64(saved("RGB")), required_rewards=[]), DataError, "required_rewards is empty"),
        (image_body(b64(saved("RGB")), required_rewards=[1]), SchemaError, "must be a string, got int"),
        (image_body(b64(saved("RGB")), metadata=[]), SchemaError, "metadata must be an object, got list"),
        (image_body(b64(saved("RGB")), id="x" * 101), DataError, "more than max_text_chars = 100"),
    ],
)
def test_a_wrong_json_body_gets_one_sentence_with_the_place(body, kind, message):
    with pytest.raises(DataError, match=message) as caught:
        decode_json(body if isinstance(body, bytes) else json.dumps(body).encode(), LIMITS)
    assert type(caught.value) is kind and "\n" not in str(caught.value)


def test_small_files_that_decode_to_much_are_refused_before_they_are_decoded():
    buffer = BytesIO()
    Image.new("RGB", (400, 1)).save(buffer, "PNG")
    many = {"requests": [image_body(b64(buffer.getvalue()))["requests"][0]] * 8}
    with pytest.raises(DataError, match="max_media_bytes = 5000"):
        decode_json(json.dumps(many).encode(), Limits(max_media_bytes=5000))


def file_of(header, data=b""):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def scored_file(samples, data=b"", rewards=("r",), version=1, **tensors):
    content = {"version": version, "rewards": list(rewards), "samples": samples}
    return file_of({"__metadata__": {"unirl_score": json.dumps(content)}, **tensors}, data)


def tensor(*shape, begin=0, end=None, dtype="U8"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, math.prod(shape) if end is None else end]}


IMAGE = [{"kind": "image"}]


def sound_file(sound, data=bytes(16), kind="video", rate=8_000):
    start = len(data)
    shape = (1, 1, 1, 3) if kind == "video" else (1, 1, 3)
    media = tensor(*shape, begin=start, end=start + 3)
    entry = {"kind": kind, "sound_rate": rate}
    return scored_file([entry], data + bytes(3), version=2, **{"sound.0": sound, "media.0": media})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not a safetensors file: 0 bytes"),
        ((2**62).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        (file_of({}), "metadata has no text unirl_score"),
        (scored_file(IMAGE, version=4), "version is 4; this side speaks versions 1 to 3"),
        (scored_file([]), "samples has 0 entries"),
        (scored_file(IMAGE * 9), "samples has 9 entries; 1 to 8"),
        (scored_file(IMAGE), "has no tensor media.0"),
        (scored_file(IMAGE, b"123", **{"media.0": tensor(1, 1, 3, end=4)}), "do not hold"),
        (scored_file(IMAGE, b"12", **{"media.0": tensor(1, 1, 3)}), "do not hold"),
        (scored_file(IMAGE, b"1234", **{"media.0": tensor(1, 1, 3)}), "cover 3 of 4 bytes"),
        (scored_file(IMAGE, b"", **{"media.0": tensor(2**40, 2**40, 3)}), "must have two data_offsets"),
        (scored_file(IMAGE, b"", **{"media.0": tensor(2**40, 2**40, 3, end=9)}), "do not hold"),
        (scored_file(IMAGE, bytes(1203), **{"media.0": tensor(401, 1, 3)}), "1 x 401; it must have 1 to 400"),
        (scored_file(IMAGE, bytes(21), **{"media.0": tensor(7, 1, 1, 3)}), "7 frames"),
        (scored_file(IMAGE, bytes(3), **{"media.0": tensor(1, 1, 1, 3)}), "of kind image has shape"),
        (scored_file(IMAGE, bytes(4), **{"media.0": tensor(1, 1, 4)}), r"must have shape \[H, W, 3\]"),
        (scored_file(IMAGE, bytes(3), **{"media.0": tensor(1, 1, 3, dtype="I8")}), "dtype U8 or F32"),
        (scored_file([{"kind": "text"}]), "has no completion"),
        (scored_file([{"kind": "sound"}]), "kind must be image, video, text or audio"),
        (
            scored_file(IMAGE, bytes(6), **{"media.0": tensor(1, 1, 3), "media.1": tensor(1, 1, 3, begin=3, end=6)}),
            r"\['media.1'\] belong to no sample",
        ),
        (scored_file([{"kind": "text", "completion": "a", "fps": -1}]), "positive number of frames"),
        (sound_file(tensor(4, end=16, dtype="U8")), "tensor sound.0 must have dtype F32"),
        (sound_file(tensor(2, 1, 2, end=16, dtype="F32")), r"tensor sound.0 must have shape \[L\] or \[L, C\]"),
        (sound_file(tensor(4, 0, end=0, dtype="F32"), b""), r"tensor sound.0 must have shape \[L\] or \[L, C\]"),
        (sound_file(tensor(4, end=12, dtype="F32")), "do not hold"),
        (sound_file(tensor(4, end=16, dtype="F32"), kind="image"), "sound.0 belongs to a sample of kind image"),
        (sound_file(tensor(4, end=16, dtype="F32"), rate=0), "sound_rate must be a whole number of 1 to"),
        (sound_file(tensor(4, end=16, dtype="F32"), rate=8e3), "sound_rate must be a whole number"),
        (sound_file(tensor(4, end=16, dtype="F32"), rate=1), "sound.0 lasts 4 s; the limit is max_sound_s = 3"),
        (sound_file(tensor(6_000, end=24_000, dtype="F32"), bytes(24_000)), "more than max_media_bytes = 20000"),
        (
            scored_file([{"kind": "image", "sound_rate": 8}], bytes(3), **{"media.0": tensor(1, 1, 3)}),
            "has a sound_rate and no tensor sound.0",
        ),
        (scored_file([{"kind": "text", "completion": "a"}], rewards=[["a"], ["b"]]), "2 lists for 1 samples"),
    ],
)
def test_a_wrong_binary_body_gets_one_sentence(body, message):
    with pytest.raises(DataError, match=message):
        decode_binary(body, LIMITS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"primitives": {"video": Videos.pack(frames=[torch.zeros(1, 3, 2, 2)])}},
            r"inputs \['video'\] cannot be sent",
        ),
        ({"primitives": {"audio": Texts(texts=["a"])}}, "scorers ask for the sounds that samples were given"),
        ({"generated": {}}, "one generated medium"),
        ({"generated": {"image": Images(pixels=torch.full((1, 3, 2, 2), torch.nan))}}, "sample s0: pixels must be fin"),
        ({"generated": {"image": Images(pixels=torch.full((1, 3, 2, 2), -1.0))}}, "got -1 to -1"),
        ({"generated": {"image": Images(pixels=torch.zeros(1, 1, 2, 2))}}, "must have 3 channels"),
        ({"metadata": [{"a": (1, 2)}]}, "would change in JSON"),
        ({"metadata": [{"a": math.nan}]}, "cannot be sent as JSON"),
    ],
)
def test_what_does_not_travel_is_refused_by_the_sender(change, message):
    request = RewardRequest(sample_ids=["s0"], generated={"image": Images(pixels=torch.zeros(1, 3, 2, 2))})
    with pytest.raises((ContractError, ConfigError), match=message):
        samples_of(request.replace(**change))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_numbers_arrive_with_all_bits_and_components_keep_their_names(numbers):
    ids = [f"s{i}" for i in range(len(numbers))]
    own = torch.tensor(numbers)
    many = RewardResponse(sample_ids=ids, rewards=own, component_rewards={"q/soft": own / 3, "q/hard": own * 0 + 1})
    one = RewardResponse(sample_ids=ids, rewards=own / 7, component_rewards={"p": own / 7})
    answers = [SampleAnswer() for _ in ids]
    for name, response in (("q", many), ("p", one)):
        for answer, found in zip(answers, sub_metrics(response), strict=True):
            assert isinstance(found, dict)
            answer.results[name] = found
    arrived = decode_answer(encode_answer(answers), ids, ["q", "p"])
    assert list(answers[0].results["q"]) == ["reward", "soft", "hard"]
    for name, response in (("q", many), ("p", one)):
        assert torch.equal(arrived[name].rewards, response.rewards) and all(arrived[name].successes)
        assert list(arrived[name].component_rewards) == list(response.component_rewards)
        for key, value in response.component_rewards.items():
            assert torch.equal(arrived[name].component_rewards[key], value)


def test_a_sample_without_a_finite_number_arrives_as_a_failure_with_its_reason():
    response = RewardResponse(
        sample_ids=["a", "b", "c"],
        rewards=torch.tensor([1.0, torch.nan, torch.inf]),
        component_rewards={"r/x": torch.tensor([2.0, 3.0, 4.0])},
        errors=[None, "its prompt is empty", None],
    )
    found = sub_metrics(response)
    assert found == [{"reward": 1.0, "x": 2.0}, "its prompt is empty", "its values are {'reward': inf}"]
    odd = [
        {"results": [{"r": {"reward": 1.0}}, {"r": {"reward": None}}, {}], "errors": [{}, {}, {}]},
        {"results": [{"r": {"reward": True}}, {"r": {"reward": 1e39}}, {"r": {}}], "errors": [{}, {}, {}]},
        {"results": [{}, {"r": {"reward": "1"}}, {"r": {"reward": 3}}], "errors": [{"r": "boom"}, {}, {}]},
    ]
    expected = [[True, False, False], [False, False, False], [False, False, True]]
    for content, successes in zip(odd, expected, strict=True):
        got = decode_answer(json.dumps(content).encode(), ["a", "b", "c"], ["r"])["r"]
        assert got.successes == successes
        assert got.rewards.isfinite().tolist() == successes and all(
            (error is None) == good for error, good in zip(got.errors, successes, strict=True)
        )
    with pytest.raises(DataError, match="results must be a list of 2 objects, one per sample; got 1"):
        decode_answer(b'{"results": [{}], "errors": [{}]}', ["a", "b"], ["r"])
    with pytest.raises(DataError, match="the answer is not JSON"):
        decode_answer(b"<html>", ["a"], ["r"])
