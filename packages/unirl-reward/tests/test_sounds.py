"""Sounds alone and sounds of prompts: what a scorer hears elsewhere is what it hears in this process."""

import base64
import dataclasses
import io
import json
import struct
import wave
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.reward.base import LocalScorer
from unirl.reward.child.host import answered
from unirl.reward.function import FunctionRewardScorer
from unirl.reward.remote import RemoteRewardBackend
from unirl.reward.wire import (
    Limits,
    SchemaError,
    batch_key,
    decode_answer,
    decode_binary,
    decode_json,
    encode_binary,
    encode_json,
    request_of,
    samples_of,
)
from unirl.types.errors import ContractError, DataError
from unirl.types.media import Audios, Images, Texts
from unirl.types.reward import RewardRequest

from .fake_server import FakeServer

LIMITS = Limits(max_samples=8, max_pixels=400, max_media_bytes=20_000, max_text_chars=100, max_sound_s=3)


@st.composite
def audios(draw, num, *, is_rated=True):
    """Sounds of any values and lengths, some empty, of one channel or two."""
    num_channels = draw(st.sampled_from([None, 2]))
    sounds = []
    for _ in range(num):
        words = draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6))
        words = words[: len(words) // (num_channels or 1) * (num_channels or 1)]
        shape = (-1,) if num_channels is None else (len(words) // num_channels, num_channels)
        sounds.append(torch.tensor(words, dtype=torch.int32).view(torch.float32).reshape(shape))
    rates = [7, 16_000, 44_100] if is_rated else [None, 16_000]
    return Audios.pack(waveform=sounds, sample_rate=draw(st.sampled_from(rates)))


@st.composite
def requests(draw, *, is_rated=True):
    """A sound or an image of each prompt, and perhaps a sound and an image that it shows."""
    num = draw(st.integers(1, 3))
    primitives: dict[str, Any] = {"text": Texts(texts=["a"] * num)}
    if draw(st.booleans()):
        primitives["image"] = Images(pixels=torch.ones(num, 3, 2, 3))
    if draw(st.booleans()):
        primitives["audio"] = draw(audios(num, is_rated=is_rated))
    sound = {"audio": draw(audios(num, is_rated=is_rated))}
    made = draw(st.sampled_from([sound, {"image": Images(pixels=torch.zeros(num, 3, 4, 5))}]))
    return RewardRequest(
        sample_ids=[str(i) for i in range(num)], primitives=primitives, generated=made, metadata=[None] * num
    )


def bits(media):
    if isinstance(media, Texts):
        return media.texts
    if isinstance(media, Images):
        return media.pixels.tolist()
    return media.waveform.view(torch.int32).tolist(), media.cu_seqlens.tolist(), media.sample_rate


def assert_same_media(found, expected):
    for left, right in ((found.primitives, expected.primitives), (found.generated, expected.generated)):
        assert list(left) == list(right)
        assert [bits(media) for media in left.values()] == [bits(media) for media in right.values()]


def binary(request):
    return b"".join(encode_binary(samples_of(request), ["r"]))


@settings(max_examples=50, deadline=None)
@given(requests(is_rated=False))
def test_a_sound_and_that_of_a_prompt_arrive_bit_for_bit_in_the_binary_body(request_):
    assert_same_media(request_of(decode_binary(binary(request_), LIMITS).samples), request_)


@settings(max_examples=50, deadline=None)
@given(requests())
def test_a_sound_and_that_of_a_prompt_arrive_bit_for_bit_in_json(request_):
    body = encode_json(samples_of(request_), ["r"])
    assert_same_media(request_of(decode_json(body, LIMITS).samples), request_)


@settings(max_examples=30, deadline=None)
@given(requests(), st.data())
def test_a_changed_body_is_refused_or_read_but_never_crashes(request_, data):
    samples = samples_of(request_)
    for body, read in ((binary(request_), decode_binary), (encode_json(samples, ["r"]), decode_json)):
        changed = bytearray(body)
        for _ in range(data.draw(st.integers(1, 4))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        try:
            read(bytes(changed), LIMITS)
        except DataError as error:
            assert str(error)


class Heard(LocalScorer):
    """What it hears, sample by sample: of what was made, and of the prompt."""

    def score_batch(self, request):
        made, given = request.generated["audio"], request.source_sounds
        pairs = zip(made.unpack("waveform"), given.unpack("waveform"), strict=True)
        rates = torch.tensor([made.sample_rate, given.sample_rate]).float()
        return torch.stack([(own.sin().sum() + 3 * prompt.cos().sum()) / rates.sum() for own, prompt in pairs])


def loudness(sounds, prompts, metadata):
    return [float(each.waveform.square().mean()) * each.rate for each in sounds]


SCORERS = {"heard": Heard(name="heard", batch_size=2), "loudness": FunctionRewardScorer(loudness, name="loudness")}


def heard_request(lengths=(40, 90, 17), channels=()):
    generator = torch.Generator().manual_seed(0)

    def sounds(*, extra):
        waveforms = [torch.rand(num + extra, *channels, generator=generator) * 2 - 1 for num in lengths]
        return Audios.pack(waveform=waveforms, sample_rate=16_000 + extra)

    return RewardRequest(
        sample_ids=[f"s{i}" for i in range(len(lengths))],
        group_ids=["g"] * len(lengths),
        primitives={"text": Texts(texts=["rain"] * len(lengths)), "audio": sounds(extra=5)},
        generated={"audio": sounds(extra=0)},
        metadata=[None] * len(lengths),
    )


@pytest.mark.parametrize("way", ["binary", "json", "child"])
@pytest.mark.parametrize("channels", [(), (1,), (2,)])
def test_scorers_elsewhere_give_the_bits_of_this_process(way, channels):
    request = heard_request(channels=channels)
    for name, scorer in SCORERS.items():
        expected = scorer.score_isolated(request, "sample")
        assert all(expected.successes) and len(set(expected.rewards.tolist())) == 3
        if way == "child":
            found = decode_answer(answered(scorer, name, binary(request)), request.sample_ids, [name])[name]
        else:
            with FakeServer(SCORERS) as server:
                remote = RemoteRewardBackend(server.url, [name], name=name, transport=way, start_timeout_s=0.0)
                found = remote.score(request)
                remote.close()
        assert torch.equal(found.rewards, expected.rewards)


def test_a_body_with_a_sound_alone_or_of_a_prompt_is_one_that_earlier_readers_refuse():
    both = samples_of(heard_request())
    alone = [dataclasses.replace(sample, source_sound=None, source_sample_rate=None) for sample in both]
    image = samples_of(heard_request().replace(generated={"image": Images(pixels=torch.zeros(3, 3, 2, 2))}))
    for samples in (both, alone, image):
        body = b"".join(encode_binary(samples, ["r"]))
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        assert json.loads(header["__metadata__"]["unirl_score"])["version"] == 3
    # A server from before sounds reads one of these fields of the last turn, and an image of the turn before it.
    for samples in (both, alone, image):
        for entry in json.loads(encode_json(samples, ["r"]))["requests"]:
            *before, last = entry["history"]
            is_known = any(key in last for key in ("image_b64", "video_b64", "video_path", "completion"))
            assert not is_known or (before and "image_b64" not in before[0])
    reason = "unirl_score.version is 3; this side speaks versions 1 to 2"
    with FakeServer(SCORERS, faults=[web.json_response({"detail": reason}, status=422)]) as server:
        remote = RemoteRewardBackend(server.url, ["heard"], start_timeout_s=0.0)
        with pytest.raises(ContractError, match=f"{reason}. .*set transport: json, or install the same version there"):
            remote.score(heard_request())
        remote.close()


def test_samples_whose_sounds_differ_in_rate_or_channels_make_no_batch():
    first = samples_of(heard_request())[0]
    assert batch_key(first) == batch_key(samples_of(heard_request((3, 4)))[1])
    for changes in (
        {"sample_rate": 8_000},
        {"source_sample_rate": None},
        {"source_sound": None},
        {"media": np.zeros((4, 2), np.float32)},
        {"source_sound": np.zeros((4, 2), np.float32)},
    ):
        assert batch_key(dataclasses.replace(first, **changes)) != batch_key(first)


def test_a_sound_with_a_number_that_is_not_finite_fails_alone():
    request = heard_request()
    request.generated["audio"].waveform[45] = torch.nan
    found = SCORERS["loudness"].score_isolated(request, "sample")
    assert found.successes == [True, False, True] and found.errors[1] == "its generated media holds non-finite numbers"


def test_json_needs_a_rate_and_says_so():
    request = heard_request()
    request = request.replace(generated={"audio": request.generated["audio"].replace(sample_rate=None)})
    with pytest.raises(ContractError, match="sample s0: its sound has no sample_rate, which JSON must say. Send it in"):
        encode_json(samples_of(request), ["r"])


def wav_of(data, width, num_channels=1, rate=8_000):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setnchannels(num_channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(data)
    return buffer.getvalue()


def json_of(data, **turn):
    turn = {"text": "a", "audio_b64": base64.b64encode(data).decode(), **turn}
    return json.dumps({"requests": [{"history": [turn], "required_rewards": ["r"]}]}).encode()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_whole_numbers_of_every_width_are_divided_by_their_range(width):
    most = 2 ** (8 * width - 1)
    numbers = [-most, -1, 0, 1, most - 1, most // 2]
    data = b"".join(
        bytes([each + 128]) if width == 1 else each.to_bytes(width, "little", signed=True) for each in numbers
    )
    [sample] = decode_json(json_of(wav_of(data, width)), LIMITS).samples
    assert isinstance(sample.media, np.ndarray) and sample.media.dtype == np.float32 and sample.sample_rate == 8_000
    assert sample.media.tolist() == [float(np.float32(each / most)) for each in numbers]
    # float32 has 24 bits, so narrower samples are exact, and those of 32 bits within half of 2^-24.
    bound = 0 if width < 4 else 2.0**-25
    assert np.abs(sample.media.astype(np.float64) - np.array(numbers) / most).max() <= bound
    [pair] = decode_json(json_of(wav_of(data, width, num_channels=2)), LIMITS).samples
    assert isinstance(pair.media, np.ndarray) and np.array_equal(pair.media, sample.media.reshape(3, 2))


def part(name, content):
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def riff(*parts):
    body = b"WAVE" + b"".join(parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def form(tag=3, channels=1, rate=8_000, bits=32, rest=b""):
    return part(b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, 0, channels * bits // 8, bits) + rest)


def test_other_parts_longer_floats_and_the_extensible_format_are_read():
    samples = np.array([0.1, -2.5, 1e-9])
    as_float = part(b"data", samples.astype("<f4").tobytes())
    extensible = struct.pack("<HHIH", 22, 32, 0, 3) + bytes(14)
    for data in (
        riff(part(b"LIST", b"abc"), form(), as_float),
        riff(form(bits=64), part(b"data", samples.astype("<f8").tobytes())),
        riff(form(tag=0xFFFE, rest=extensible), as_float),
    ):
        [sample] = decode_json(json_of(data), LIMITS).samples
        assert isinstance(sample.media, np.ndarray) and np.array_equal(sample.media, samples.astype(np.float32))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (riff(form()), "damaged WAV file: it has no part 'data'"),
        (riff(part(b"data", b"")), "damaged WAV file: it has no part 'fmt'"),
        (riff(part(b"fmt ", b"ab"), part(b"data", b"")), "its format has 2 bytes of 16"),
        (riff(form(), part(b"data", bytes(8)))[:-3], "it ends before its 8 bytes do"),
        (riff(form(tag=2, bits=4), part(b"data", b"")), "1 channels of 4 bits in format 2; send WAV of 8"),
        (riff(form(channels=0), part(b"data", b"")), "0 channels"),
        (riff(form(rate=0), part(b"data", b"")), "0 samples per second; it must have 1 to"),
        (riff(form(rate=1), part(b"data", bytes(16))), "audio_b64 lasts 4 s; the limit is max_sound_s = 3"),
        (riff(form(), part(b"data", bytes(20_004))), "more than max_media_bytes = 20000"),
        (b"no sound at all", r"is not a sound that can be decoded|needs PyAV on the server"),
    ],
)
def test_a_wrong_sound_in_json_gets_one_sentence(data, message):
    with pytest.raises(DataError, match=message):
        decode_json(json_of(data), LIMITS)


def test_flac_is_read_with_its_rate_by_pyav():
    av: Any = pytest.importorskip("av")
    whole = np.random.default_rng(0).integers(-(2**15), 2**15, (1, 4_000)).astype(np.int16)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=8_000, layout="mono", format="s16")
        frame = av.AudioFrame.from_ndarray(whole, format="s16", layout="mono")
        frame.sample_rate = 8_000
        for packet in (*stream.encode(frame), *stream.encode()):
            container.mux(packet)
    data = buffer.getvalue()
    [sample] = decode_json(json_of(data), Limits()).samples
    assert isinstance(sample.media, np.ndarray) and sample.sample_rate == 8_000
    assert np.array_equal(sample.media, whole.T / np.float32(2**15))
    with pytest.raises(DataError, match="audio_b64 lasts .* the limit is max_sound_s = 0.25"):
        decode_json(json_of(data), Limits(max_sound_s=0.25))


def test_turns_say_what_they_may_hold():
    sound = base64.b64encode(wav_of(bytes(4), 2)).decode()
    heard, made = {"text": "", "audio_b64": sound}, {"text": "a", "completion": "c"}
    for turns, message in (
        ([heard, heard, made], r"history\[1\] has a second audio_b64; a prompt has one image and one sound"),
        ([{"text": ""}, made], r"history\[0\] must have image_b64 or audio_b64"),
        ([heard, heard, heard, made], "history has 4 turns"),
        ([{**heard, **made}], "exactly one of"),
    ):
        body = json.dumps({"requests": [{"history": turns, "required_rewards": ["r"]}]}).encode()
        with pytest.raises(DataError, match=message):
            decode_json(body, LIMITS)
    body = json.dumps({"requests": [{"history": [heard, made], "required_rewards": ["r"]}]}).encode()
    [sample] = decode_json(body, LIMITS).samples
    assert sample.media == "c" and isinstance(sample.source_sound, np.ndarray) and sample.source_sample_rate == 8_000
    [undecoded] = decode_json(body, LIMITS, is_scored=lambda kind, names: False).samples
    assert undecoded.source_sound is None and undecoded.media is None


def test_a_wrong_sound_in_the_binary_body_names_its_place():
    body = binary(heard_request((1,)))
    for old, new, message in (
        (b'\\"kind\\": \\"audio\\"', b'\\"kind\\": \\"image\\"', "sound.0 belongs to a sample of kind image"),
        (b'"sound.0"', b'"other.0"', "tensor other.0 must have dtype|must have shape"),
        (
            b'\\"source_sound_rate\\": 16005',
            b'\\"source_sound_rate\\": 16.05',
            "source_sound_rate must be a whole number",
        ),
        (b'"source_sound.0"', b'"source_sound.7"', "has a source_sound_rate and no tensor source_sound.0"),
    ):
        assert body.count(old) == 1
        with pytest.raises(SchemaError, match=message):
            decode_binary(body.replace(old, new), LIMITS)
