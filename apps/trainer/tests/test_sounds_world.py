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

FOLDER = Path(unirl.worlds.sounds.world.__file__).parent


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
    videos = [torch.from_numpy(world.render_video(world.sample_video(each.video, rng, 0.0), rng)) for each in specs]
    sounds = [torch.from_numpy(world.render_sound(world.sample_sound(each.tone, rng, 0.0), rng)) for each in specs]
    # Of nine frames one in some hundred is read as another shape.
    for least, (strict, soft) in (
        (0.97, score_videos(videos, prompts)),
        (1.0, score_sounds(sounds, world.RATE, prompts)),
    ):
        assert strict.mean() >= least
        assert torch.equal(strict == 1, soft == 1)


def test_near_misses_of_every_prompt_fail() -> None:
    rng = np.random.default_rng(1)
    specs, prompts = world.all_specs(), world.all_prompts()
    videos = [torch.from_numpy(world.render_video(world.near_miss_video(each.video, rng), rng)) for each in specs]
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
        torch.from_numpy(world.render_video(world.sample_video(parse_prompt(each).video, rng, 0.0), rng)).float() / 255
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
