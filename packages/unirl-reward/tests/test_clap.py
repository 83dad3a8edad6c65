"""CLAP's score of a sound against transformers, on a tiny random model."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from aiohttp import web
from scipy.signal import resample_poly

from unirl.reward.child.scorer import ChildScorer
from unirl.reward.local.sounds.clap import CLAPScorer, mono, windows
from unirl.reward.remote import RemoteRewardBackend
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Audios, Texts, Videos
from unirl.types.reward import RewardRequest

from .fake_server import FakeServer

RATE = 8_000


@pytest.fixture(scope="module", params=["unfused", "fused"])
def clap_folder(request, tmp_path_factory, clip_folder):
    """A CLAP folder as the hub has them: two random towers, CLIP's byte tokenizer, an extractor of one second."""
    is_fused = request.param == "fused"
    path = tmp_path_factory.mktemp("clap")
    tokenizer = transformers.CLIPTokenizer.from_pretrained(clip_folder)
    torch.manual_seed(0)
    text: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    text |= {"pad_token_id": 1}
    sound: dict[str, Any] = {"spec_size": 64, "num_mel_bins": 16, "window_size": 4, "patch_size": 4}
    sound |= {"patch_stride": [4, 4], "enable_fusion": is_fused, "fusion_type": "aff_2d" if is_fused else None}
    sound |= {"patch_embeds_hidden_size": 16, "hidden_size": 32, "depths": [1, 1], "num_attention_heads": [2, 2]}
    config = transformers.ClapConfig(text_config=text, audio_config=sound, projection_dim=8)
    model = transformers.ClapModel(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.mul_(4) if parameter.ndim > 1 and "projection" not in name else None
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    options: dict[str, Any] = {"feature_size": 16, "sampling_rate": RATE, "max_length_s": 1, "frequency_max": 4000}
    options |= {"hop_length": 80, "fft_window_size": 256, "truncation": "fusion" if is_fused else "rand_trunc"}
    transformers.ClapFeatureExtractor(**options).save_pretrained(path)
    return str(path)


def waveforms(*seconds, rate=RATE, channels=1):
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(int(rate * each), channels, generator=generator) * 2 - 1 for each in seconds]


def request_of(sounds, prompts, rate=RATE, metadata=None):
    names = [f"v{number}" for number in range(len(prompts))]
    videos = Videos.pack(frames=[torch.zeros(2, 3, 4, 4) for _ in names])
    audio = None if sounds is None else Audios.pack(waveform=sounds).replace(sample_rate=rate)
    return RewardRequest(
        sample_ids=names,
        group_ids=names,
        primitives={"text": Texts(texts=prompts)},
        generated={"video": videos.replace(audio=audio)},
        metadata=metadata or [{} for _ in names],
    )


def reference(folder, waveform, text):
    """One sound and one text through transformers' own classes."""
    model = transformers.ClapModel.from_pretrained(folder).eval()
    tokens = transformers.CLIPTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    ready = transformers.ClapFeatureExtractor.from_pretrained(folder)(waveform, sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        out = model(**ready, input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    return torch.nn.functional.cosine_similarity(out.audio_embeds, out.text_embeds).item()


def test_a_score_is_the_cosine_of_transformers(clap_folder):
    scorer = CLAPScorer(model=clap_folder)
    sounds, prompts = waveforms(0.5, 1.0), ["rain on a roof", "a dog barks"]
    found = scorer.score(request_of(sounds, prompts)).rewards
    expected = [reference(clap_folder, w[:, 0].numpy(), p) for w, p in zip(sounds, prompts, strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-5) and abs(expected[0] - expected[1]) > 1e-3
    told = [{"sound": "a dog barks"}, {}]
    assert scorer.score(request_of(sounds, prompts, metadata=told)).rewards[0] != found[0]


def test_a_sound_alone_has_the_score_of_the_same_sound_in_a_video(clap_folder):
    scorer = CLAPScorer(model=clap_folder)
    sounds, prompts = waveforms(0.5, 1.0), ["rain on a roof", "a dog barks"]
    request = request_of(sounds, prompts)
    alone = request.replace(generated={"audio": Audios.pack(waveform=sounds, sample_rate=RATE)})
    assert torch.equal(scorer.score(alone).rewards, scorer.score(request).rewards)
    unrated = request.replace(generated={"audio": Audios.pack(waveform=sounds)})
    assert "it has no sound, or none of a known rate" in str(scorer.score_isolated(unrated, "sample").errors[0])


def test_longer_sounds_are_judged_in_windows_whatever_the_random_state(clap_folder):
    scorer, [sound] = CLAPScorer(model=clap_folder), waveforms(2.5)
    np.random.seed(0)
    first = scorer.score(request_of([sound], ["rain"])).rewards
    np.random.seed(1)
    assert torch.equal(first, scorer.score(request_of([sound], ["rain"])).rewards)
    parts = [sound[:RATE], sound[RATE : 2 * RATE], sound[-RATE:]]
    expected = [reference(clap_folder, part[:, 0].numpy(), "rain") for part in parts]
    assert first.item() == pytest.approx(sum(expected) / 3, abs=1e-5)


def test_sounds_are_brought_to_one_channel_and_the_rate_of_the_model():
    [stereo] = waveforms(0.5, rate=24_000, channels=2)
    found = mono(stereo, 24_000, RATE)
    assert found.dtype == np.float32 and found.shape == (RATE // 2,)
    np.testing.assert_allclose(found, resample_poly(stereo.mean(dim=1).numpy(), 1, 3), rtol=1e-5, atol=1e-6)
    time = np.arange(24_000) / 24_000
    tone = mono(torch.from_numpy(np.sin(2 * np.pi * 440 * time)), 24_000, 48_000)
    spectrum = np.abs(np.fft.rfft(tone))
    assert spectrum.argmax() == 440 and len(tone) == 48_000
    assert [len(each) for each in windows(np.zeros(25), 10)] == [10, 10, 10]
    assert [len(each) for each in windows(np.zeros(10), 10)] == [10]


def test_a_video_without_sound_fails_alone_and_says_so(clap_folder):
    scorer = CLAPScorer(model=clap_folder)
    [sound] = waveforms(0.5)
    found = scorer.score_isolated(request_of([sound, sound[:0]], ["rain", "wind"]), "sample")
    assert found.successes == [True, False] and "its video has no sound" in str(found.errors[1])
    assert "no sound" in str(scorer.score_isolated(request_of(None, ["rain"]), "sample").errors[0])


@pytest.mark.parametrize("way", ["server", "child"])
def test_a_sound_in_another_process_has_the_score_of_this_one_bit_for_bit(clap_folder, way):
    scorer = CLAPScorer(model=clap_folder)
    request = request_of(waveforms(0.3, 1.7, 0, rate=24_000, channels=2), ["rain", "wind", "a bell"], rate=24_000)
    expected = scorer.score_isolated(request, "sample")
    assert expected.successes == [True, True, False]
    with contextlib.ExitStack() as stack:
        if way == "child":
            elsewhere: Any = ChildScorer(
                f"{CLAPScorer.__module__}.CLAPScorer", None, {"model": clap_folder}, name="clap"
            )
        else:
            elsewhere = RemoteRewardBackend(stack.enter_context(FakeServer({"clap": scorer})).url, ["clap"])
        stack.callback(elsewhere.close)
        found = elsewhere.score(request)
    assert torch.equal(found.rewards[:2], expected.rewards[:2]) and found.errors == expected.errors


def test_a_server_that_knows_no_sounds_is_one_message_and_json_another(clap_folder):
    reason = "unirl_score.version is 2; this side speaks version 1"  # what servers without sounds say
    request = request_of(waveforms(0.5), ["rain"])
    with FakeServer(
        {"clap": CLAPScorer(model=clap_folder)}, faults=[web.json_response({"detail": reason}, status=422)]
    ) as server:
        for transport, message in (
            ("binary", f"{reason}. .*install the same version there"),
            ("json", "JSON carries no sound"),
        ):
            remote = RemoteRewardBackend(server.url, ["clap"], transport=transport)
            with pytest.raises(ContractError, match=message):
                remote.score(request)
            remote.close()


def test_a_model_of_another_kind_is_refused(clip_folder):
    with pytest.raises(ConfigError, match="scorer clap: model"):
        CLAPScorer(model=clip_folder)
