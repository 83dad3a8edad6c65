from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import unirl.worlds.sounds.world
from unirl.reward.worlds.sounds import MIN_LEVEL, measure, score_sounds, score_videos
from unirl.reward.worlds.sounds_grammar import TONES, parse_prompt, prompt_of
from unirl.reward.worlds.sounds_scorer import SoundsToneScorer, SoundsVideoScorer
from unirl.types.media import Audios, Texts, Videos
from unirl.types.reward import RewardRequest
from unirl.worlds.sounds import world
from unirl.worlds.sounds.autoencoders import as_video_input, draw_sounds, draw_videos
from unirl.worlds.sounds.evaluate import load
from unirl.worlds.sounds.spectrogram import MEL_BINS, spectrogram
from unirl.worlds.sounds.text import TOKENS

FOLDER = Path(unirl.worlds.sounds.world.__file__).parent
NO_GUIDANCE = {
    "guidance_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_rescale": 0.0,
}
"""What `LTX2Pipeline` is told to sample as the trainer does."""


def heard(sound: world.Sound, seed: int = 0) -> torch.Tensor:
    """The waveform [L] of a sound."""
    return torch.from_numpy(world.render_sound(sound, np.random.default_rng(seed)))


def judged(waveform: torch.Tensor, tone: str, rate: int = world.RATE) -> tuple[float, float]:
    strict, soft = score_sounds([waveform], rate, [f"a red circle stays, a {tone} tone"])
    return strict.item(), soft.item()


def sine(pitch: float, length: int = 2688, rate: int = world.RATE) -> torch.Tensor:
    return 0.5 * torch.sin(2 * torch.pi * pitch * torch.arange(length) / rate + 0.3)


def test_every_prompt_parses_back_to_itself() -> None:
    prompts = world.all_prompts()
    assert len(prompts) == len(set(prompts)) == 135
    assert [prompt_of(parse_prompt(prompt)) for prompt in prompts] == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "a red circle stays",
        "a high tone",
        "a red circle stays, a shrill tone",
        "a red circle stays, high tone",
        "a red circle, a high tone",
        "a red circle stays, a blue square stays, a high tone",
    ],
)
def test_a_sentence_outside_the_grammar_is_named_in_the_error(prompt: str) -> None:
    with pytest.raises(ValueError, match="is not a sentence of the sounds world"):
        score_sounds([torch.zeros(2688)], world.RATE, [prompt])
    with pytest.raises(ValueError, match="is not a sentence of the sounds world"):
        score_videos([torch.zeros(9, 3, 32, 32)], [prompt])


def test_clean_drawings_of_every_prompt_pass() -> None:
    rng = np.random.default_rng(0)
    specs, prompts = world.all_specs(), world.all_prompts()
    videos = [torch.from_numpy(world.render_video(each.video.objects[0], rng)) for each in specs]
    sounds = [torch.from_numpy(world.render_sound(world.sample_sound(each.tone, rng, 0.0), rng)) for each in specs]
    for strict, soft in (score_videos(videos, prompts), score_sounds(sounds, world.RATE, prompts)):
        assert strict.mean() == soft.mean() == 1


def test_near_misses_of_every_prompt_fail() -> None:
    rng = np.random.default_rng(1)
    specs, prompts = world.all_specs(), world.all_prompts()
    videos = [
        torch.from_numpy(world.render_video(world.near_miss_video(each.video.objects[0], rng), rng)) for each in specs
    ]
    sounds = [torch.from_numpy(world.render_sound(world.near_miss_sound(each.tone, rng), rng)) for each in specs]
    strict, soft = score_videos(videos, prompts)
    assert strict.sum() == 0 and 0.4 < soft.mean() < 0.9
    strict, soft = score_sounds(sounds, world.RATE, prompts)
    # .4 of them are right in one half.
    assert strict.sum() == 0 and 0.1 < soft.mean() < 0.3


@pytest.mark.parametrize("asked", TONES)
@pytest.mark.parametrize("sound", world.all_sounds())
def test_only_the_tone_that_was_asked_for_passes_and_half_of_it_earns_half(asked: str, sound: world.Sound) -> None:
    share = sum(tone == asked for tone in sound) / 2
    assert judged(heard(sound), asked) == (float(share == 1), share)


def test_the_pitch_is_that_of_the_wave_at_any_rate_phase_and_number_of_channels() -> None:
    for rate, pitch in ((8000, 312.5), (8000, 1250.0), (24000, 600.0)):
        length = round(0.336 * rate)
        stereo = torch.stack([sine(pitch, length, rate)] * 2, dim=1)
        for waveform in (sine(pitch, length, rate), stereo):
            pitch_W, level_W, purity_W = measure(waveform, rate)
            # Frequencies of a window are a distance apart; the root mean square of a sine is its amplitude / sqrt 2.
            assert np.abs(pitch_W - pitch).max() <= 0.5 * rate / (length // 4)
            assert np.allclose(level_W, 0.5 / 2**0.5, atol=0.01) and purity_W.min() > 0.99


def test_what_is_between_two_tones_too_quiet_mixed_or_noise_fails() -> None:
    assert judged(sine(300), "low") == (1, 1)
    for pitch in (150, 420, 840, 1700):
        assert [judged(sine(pitch), tone)[1] for tone in TONES] == [0, 0, 0]
    assert judged(MIN_LEVEL * sine(300), "low") == (0, 0)
    assert judged(sine(300) + sine(600), "low") == (0, 0)
    assert judged(0.5 * torch.randn(2688, generator=torch.Generator().manual_seed(0)), "low") == (0, 0)
    assert judged(torch.zeros(2688), "low") == (0, 0)
    # Some noise on the tone is no fault.
    assert judged(sine(300) + 0.05 * torch.randn(2688, generator=torch.Generator().manual_seed(0)), "low") == (1, 1)


def test_a_sound_that_is_too_short_and_a_missing_prompt_are_named() -> None:
    with pytest.raises(ValueError, match="a sound of 200 samples at 8000 Hz is too short"):
        judged(sine(300, length=200), "low")
    with pytest.raises(ValueError, match="got 1 sounds and 0 prompts"):
        score_sounds([sine(300)], world.RATE, [])


def test_each_scorer_judges_its_own_medium() -> None:
    rng = np.random.default_rng(0)
    prompt = "a red circle moves up, a low tone"
    right, wrong = (
        torch.from_numpy(world.render_video(parse_prompt(each).video.objects[0], rng)).float() / 255
        for each in (prompt, "a red square moves up, a low tone")
    )
    waves = [heard(("low", "low")), heard(("low", "high"))]
    videos = Videos.pack(frames=[right, wrong]).replace(audio=Audios.pack(waveform=waves, sample_rate=world.RATE))
    request = RewardRequest(
        sample_ids=["a", "b"], primitives={"text": Texts(texts=[prompt] * 2)}, generated={"video": videos}
    )
    sight, sound = SoundsVideoScorer().score_batch(request), SoundsToneScorer().score_batch(request)
    assert sight["strict"].tolist() == sound["strict"].tolist() == [1, 0]
    assert sight["soft"].tolist() == [1, 0.75] and sound["soft"].tolist() == [1, 0.5]
    with pytest.raises(ValueError, match="its video has no sound"):
        SoundsToneScorer().score_batch(request.replace(generated={"video": videos.replace(audio=None)}))


def test_every_request_is_either_trained_or_held_out() -> None:
    train, heldout = world.split_prompts()
    assert sorted(train + heldout) == sorted(world.all_prompts())
    assert [sum(parse_prompt(prompt).tone == tone for prompt in heldout) for tone in TONES] == [11, 11, 11]


def test_shipped_prompt_files_are_the_split(tmp_path: Path) -> None:
    world.write_prompts(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (FOLDER / "data" / name).read_text() == (tmp_path / name).read_text()
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert len({row["prompt_id"] for row in rows}) == len(rows)
        assert all(row["metadata"]["category"] == parse_prompt(row["prompt"]).category for row in rows)


def test_a_spectrogram_shows_the_tone_and_its_amplitude() -> None:
    low, high = spectrogram(heard(("low", "low"))[None]), spectrogram(heard(("high", "high"))[None])
    assert low.shape == (1, 1, world.NUM_COLUMNS, MEL_BINS)
    # Away from the edges, which see silence.
    assert low[0, 0, 1:-1].argmax(1).max() < 4 < 10 < high[0, 0, 1:-1].argmax(1).min()
    assert torch.equal(spectrogram(torch.zeros(1, 2688)), -torch.ones(1, 1, world.NUM_COLUMNS, MEL_BINS))
    # Half the amplitude is log 2 less, and the scale is of log .01 / 2.
    loud = spectrogram(sine(500)[None])[0, 0, 5].max()
    quiet = spectrogram(0.5 * sine(500)[None])[0, 0, 5].max()
    assert (loud - quiet).item() == pytest.approx(np.log(2) / (-np.log(0.01) / 2), abs=1e-4)


def test_shipped_checkpoint_is_small() -> None:
    files = [path for path in (FOLDER / "checkpoint").rglob("*") if path.is_file()]
    assert 1e6 < sum(path.stat().st_size for path in files) <= 6.6e6


def test_coded_and_decoded_drawings_pass() -> None:
    rng = np.random.default_rng(0)
    bundle = load(FOLDER / "checkpoint").bundle
    vae, audio_vae, vocoder = bundle.vae, bundle.audio_vae, bundle.vocoder
    objects, tones = world.all_objects(), [tone for tone in TONES for _ in range(15)]
    videos, waves = draw_videos(objects, rng), draw_sounds([(tone, tone) for tone in tones], rng)
    with torch.no_grad():
        seen = vae.decode(vae.encode(as_video_input(videos)).latent_dist.mode()).sample
        heard = vocoder(audio_vae.decode(audio_vae.encode(spectrogram(waves)).latent_dist.mode()).sample)
    prompts = [f"a {each}, a {tone} tone" for each, tone in zip(objects, tones, strict=True)]
    strict, _ = score_videos(list((seen / 2 + 0.5).clamp(0, 1).transpose(1, 2)), prompts)
    # Some round shapes come back a little square in one of the nine frames.
    assert strict.mean() >= 0.7
    strict, _ = score_sounds(list(heard.transpose(1, 2)), world.RATE, prompts)
    assert strict.mean() == 1


def test_a_stock_pipeline_makes_videos_and_sounds_with_the_shipped_checkpoint_far_above_chance() -> None:
    from diffusers import LTX2Pipeline

    pipeline = LTX2Pipeline.from_pretrained(str(FOLDER / "checkpoint"))
    pipeline.set_progress_bar_config(disable=True)
    prompts = world.split_prompts()[1] * 4
    videos, sounds = pipeline(
        prompts,
        num_inference_steps=6,
        **NO_GUIDANCE,
        height=32,
        width=32,
        num_frames=world.NUM_FRAMES,
        max_sequence_length=TOKENS,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        return_dict=False,
    )
    for score, shown in (
        (score_videos, list(videos.float())),
        (lambda waves, asked: score_sounds(waves, world.RATE, asked), list(sounds.float().transpose(1, 2))),
    ):
        strict, _ = score(shown, prompts)
        shuffled, _ = score(shown, prompts[5:] + prompts[:5])
        # Binomial error over 132 samples is 0.04; a third of the prompts have the same tone.
        assert strict.mean() > 0.3
        assert shuffled.mean() < 0.4
