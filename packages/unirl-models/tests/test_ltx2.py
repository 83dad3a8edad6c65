"""What only LTX-2 has: sound next to the video."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.models.ltx2.bundle import LTX2Bundle
from unirl.models.ltx2.pipeline import LTX2Pipeline
from unirl.models.ltx23.bundle import LTX23Bundle
from unirl.models.tiny.ltx2 import AUDIO_PER_SECOND, FPS
from unirl.types.errors import ConfigError
from unirl.types.media import Texts, Videos

from .families.kit import Loaded, load, pinned, relative


@pytest.fixture(scope="module")
def ltx2(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load("ltx2_t2v", tmp_path_factory.mktemp("ltx2") / "ltx2")


@pytest.fixture(scope="module")
def ltx23(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load("ltx23_t2v", tmp_path_factory.mktemp("ltx2") / "ltx23")


@pytest.mark.parametrize(("version", "rate"), [("ltx2", 400), ("ltx23", 800)])
def test_a_sample_brings_the_sound_of_the_stock_pipeline(
    version: str, rate: int, request: pytest.FixtureRequest
) -> None:
    _sounds_as_the_stock_pipeline(request.getfixturevalue(version), rate)


def _sounds_as_the_stock_pipeline(ltx2: Loaded, rate: int) -> None:
    request = ltx2.request(ltx2.family.sampling())
    with ltx2.ours.evaluating():
        videos = ltx2.ours.decode(ltx2.sample(request), request.params)
    assert isinstance(videos, Videos) and videos.audio is not None
    call = ltx2.family.call(request)
    ltx2.stock.scheduler = pinned(ltx2.ours.sigmas(request.params))
    with torch.no_grad():
        _, expected = ltx2.stock(**call, num_inference_steps=5, output_type="pt", return_dict=False)
    found = torch.stack(
        [part.waveform for part in (videos.select([row]).audio for row in range(3)) if part is not None]
    )
    assert found.shape == (3, expected.shape[2], 2) and videos.audio.sample_rate == rate
    assert relative(found, expected.transpose(1, 2)) <= 1e-4


def test_sound_is_as_long_as_the_video(ltx2: Loaded) -> None:
    adapter: Any = ltx2.ours.adapter
    for num_frames in (9, 25, 121):
        _, steps, _ = adapter.audio_shape(ltx2.family.sampling(num_frames=num_frames))
        assert steps == round(num_frames / FPS * AUDIO_PER_SECOND)


def test_both_streams_shape_each_other(ltx2: Loaded) -> None:
    """The velocity of the video depends on the audio latents and the other way round."""
    params = ltx2.family.sampling(guidance_scale=1.0)
    request = ltx2.request(params)
    adapter: Any = ltx2.ours.adapter
    video_size = adapter.parts(request.noise, params)[0][0].numel()
    sigma, step = torch.full((3,), 0.7), torch.zeros(3, dtype=torch.int64)
    with ltx2.ours.evaluating():
        conditions = ltx2.ours.encode({"text": Texts(texts=request.texts)}, params)
        base = ltx2.ours.velocity(conditions, request.noise, sigma, step, params)
        video, audio = slice(None, video_size), slice(video_size, None)
        for changed, other in ((video, audio), (audio, video)):
            x = request.noise.clone()
            x[:, changed] *= 0.5
            moved = ltx2.ours.velocity(conditions, x, sigma, step, params)
            assert not torch.allclose(moved[:, other], base[:, other], atol=1e-5)


def test_a_length_that_the_registers_do_not_divide_is_refused(ltx2: Loaded) -> None:
    with pytest.raises(ConfigError, match=r"max_sequence_length = 60 is not a multiple of the 8 registers.* Use 64"):
        ltx2.ours.latent_shape(ltx2.family.sampling(max_sequence_length=60))


def test_the_band_that_the_vocoder_of_2_3_adds_is_heard(ltx23: Loaded) -> None:
    """The waveform is the first stage's, resampled, and something else."""
    vocoder: Any = ltx23.stock.vocoder
    spectrogram = torch.randn(1, 2, 6, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, first = vocoder(spectrogram), vocoder.vocoder(spectrogram)
        resampled = vocoder.resampler(first).clamp(-1, 1)
    assert whole.shape == resampled.shape == (1, 2, 2 * first.shape[-1])
    assert relative(whole, resampled) > 1e-2


@pytest.mark.parametrize(
    ("name", "bundle", "message"),
    [
        (
            "ltx2",
            LTX23Bundle,
            r"is LTX-2; LTX23Bundle loads LTX-2.3. Set bundle._target_: unirl.models.ltx2.bundle.LTX2B",
        ),
        (
            "ltx23",
            LTX2Bundle,
            r"is LTX-2.3; LTX2Bundle loads LTX-2. Set bundle._target_: unirl.models.ltx23.bundle.LTX23",
        ),
    ],
)
def test_another_version_is_refused_with_what_loads_it(
    name: str, bundle: Any, message: str, request: pytest.FixtureRequest
) -> None:
    loaded: Loaded = request.getfixturevalue(name)
    with pytest.raises(ConfigError, match=message):
        bundle(str(loaded.folder))


@pytest.mark.parametrize("bundle", [LTX2Bundle, LTX23Bundle])
@pytest.mark.parametrize("file", ["model_index.json", "transformer/config.json"])
def test_a_later_version_is_refused_by_name(bundle: Any, file: str, ltx23: Loaded, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ltx23.folder, tmp_path / "later"))
    later = {
        "model_index.json": {"text_encoder": ["transformers", "Gemma4UnifiedForConditionalGeneration"]},
        "transformer/config.json": {"use_prompt_adaln_single": False},
    }
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(settings | later[file]))
    with pytest.raises(ConfigError, match=r"later is LTX-2.5 .*; LTX-2 and LTX-2.3 are known"):
        bundle(str(folder))


def test_an_older_diffusers_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("diffusers.pipelines.ltx2.vocoder.LTX2VocoderWithBWE")
    monkeypatch.delitem(sys.modules, "unirl.models.ltx23.bundle")
    with pytest.raises(ImportError, match=r"LTX-2.3 needs diffusers 0.38 or later.*pip install 'diffusers>=0.38'"):
        importlib.import_module("unirl.models.ltx23.bundle")


# Gradient from video to sound -----------------------------------------------------------------------------------------

SOUND = "transformer_blocks.0.audio_attn1.to_q.weight"
"""Reached by the video's loss through the sound alone."""


def gradients_of(medium: str, spans: Any, tmp_path: Path, *, recomputes: bool = False) -> dict[str, Tensor]:
    """Gradients of the mean square of one medium's velocity, and the velocity."""
    loaded = load("ltx2_t2v", tmp_path / "ltx2")
    bundle: Any = loaded.ours.bundle
    pipeline: Any = LTX2Pipeline(bundle, loaded.ours.strategy, audio_gradient=spans)
    params = loaded.family.sampling(guidance_scale=1.0)
    request = loaded.request(params)
    transformer = pipeline.bundle.transformer
    if recomputes:
        transformer.enable_gradient_checkpointing()
        transformer.train()
    conditions = pipeline.encode({"text": Texts(texts=request.texts)}, params)
    rows = len(request.texts)
    velocity = pipeline.velocity(
        conditions, request.noise, torch.full((rows,), 0.6), torch.zeros(rows, dtype=torch.long), params
    )
    velocity[:, pipeline.media_slices(params)[medium]].square().mean().backward()
    found = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    return {**found, "velocity": velocity.detach()}


def test_scaled_gradients_leave_velocities_alone_and_cut_what_the_video_sends_to_the_sound(tmp_path: Path) -> None:
    whole = gradients_of("video", None, tmp_path)
    cut = gradients_of("video", [[0, 1, 0.0]], tmp_path)
    assert torch.equal(whole["velocity"], cut["velocity"])
    assert whole[SOUND].abs().max() > 0
    sound = {name for name in cut if ".audio_attn" in name or ".audio_ff" in name or name.startswith("audio_proj_in")}
    assert len(sound) > 20
    assert not any(cut[name].any() for name in sound)
    for name in ("transformer_blocks.0.audio_to_video_attn.to_k.weight", "transformer_blocks.0.attn1.to_q.weight"):
        assert cut[name].abs().max() > 0


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_gradient_is_proportional_to_the_scale(recomputes: bool, tmp_path: Path) -> None:
    # Block 0 is cut, so that block 1 is the only way from the video to the sound; halves are exact.
    one, half = (
        gradients_of("video", [[0, 0, 0.0], [1, 1, scale]], tmp_path, recomputes=recomputes) for scale in (1.0, 0.5)
    )
    assert one[SOUND].abs().max() > 0 and torch.equal(half[SOUND], 0.5 * one[SOUND])
    video = "transformer_blocks.1.attn1.to_q.weight"  # of block 0 some reach the loss through the sound
    assert torch.equal(half[video], one[video])


def test_the_sounds_own_gradient_does_not_pass_the_last_block_s_scale(tmp_path: Path) -> None:
    whole, cut = gradients_of("audio", None, tmp_path), gradients_of("audio", [[1, 1, 0.0]], tmp_path)
    assert all(torch.equal(gradient, cut[name]) for name, gradient in whole.items())


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[0, 2, 0.5]], "audio_gradient names block 2 of 2, counted from 0. End at 1"),
        ([[0, 0, 1.5]], "scales the gradient of blocks 0 to 0 by 1.5. Set a scale from 0 to 1"),
        ([[1, 1, 0.5], [0, 0, 0.5]], "has blocks 0 to 0 after block 1"),
        ([[0, 0.5]], r"has \[0, 0.5\], which is not \[first block, last block, scale\]"),
    ],
)
def test_spans_that_the_model_does_not_have_are_refused(spans: Any, message: str, ltx2: Loaded) -> None:
    bundle: Any = ltx2.ours.bundle
    with pytest.raises(ConfigError, match=message):
        LTX2Pipeline(bundle, ltx2.ours.strategy, audio_gradient=spans)
