"""What only MiniMax-H3 has: sound on a schedule apart, a folder of blocks, and a part of a text encoder."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from unirl.models import loading
from unirl.models.diffusers_pipeline.rules import _latent_divisor
from unirl.models.minimax_h3 import rules
from unirl.models.minimax_h3.bundle import MiniMaxH3Bundle
from unirl.models.minimax_h3.levels import sound_scale, sound_sigma, sound_velocity
from unirl.models.minimax_h3.text import LAYER
from unirl.sde.schedule import SigmaSchedule
from unirl.types.errors import ConfigError, DataError
from unirl.types.media import Images, Texts, Videos

from .families.kit import Loaded, load, relative

NAME = "minimax_h3_t2v"


@pytest.fixture(scope="module")
def h3(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(NAME, tmp_path_factory.mktemp("h3") / "h3")


# Two noise levels as one ---------------------------------------------------------------------------------------------


def test_scaled_latents_of_sound_are_at_the_level_of_the_video() -> None:
    """Both schedules of diffusers, a clean latent and a noise, in float64."""
    scheduler_class: Any = diffusers.MiniMaxH3Scheduler
    video, audio = (scheduler_class(shift=shift) for shift in (12.0, 3.0))
    for scheduler in (video, audio):
        scheduler.set_timesteps(9)
    sigmas, expected = video.sigmas.double(), audio.sigmas.double()
    torch.testing.assert_close(sigmas.float(), SigmaSchedule("linear", shift=12.0).sigmas(8), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sound_sigma(sigmas, 4.0), expected, rtol=1e-6, atol=1e-7)
    clean, noise = torch.tensor(0.7).double(), torch.tensor(-1.3).double()
    own = sound_sigma(sigmas, 4.0)
    found = sound_scale(sigmas, 4.0) * ((1 - own) * clean + own * noise)
    torch.testing.assert_close(found, (1 - sigmas) * 4.0 * clean + sigmas * noise)
    k = sound_scale(sigmas, 4.0)
    torch.testing.assert_close(
        sound_velocity(found, noise - clean, k, 4.0), (noise - 4.0 * clean).expand_as(found), rtol=1e-9, atol=1e-9
    )


def test_a_step_of_euler_is_the_same_step_in_both_coordinates() -> None:
    """A velocity that is not constant, walked along the sound's own levels and, scaled, along the video's."""
    sigmas = SigmaSchedule("linear", shift=12.0).sigmas(6).double()
    own = sound_sigma(sigmas, 4.0)
    z = torch.linspace(-1, 1, 5, dtype=torch.float64)
    x = z.clone()
    for at in range(6):
        k = sound_scale(sigmas[at], 4.0)
        velocity = torch.sin(3 * x / k + own[at])
        x = x + (sigmas[at + 1] - sigmas[at]) * sound_velocity(x, velocity, k, 4.0)
        z = z + (own[at + 1] - own[at]) * torch.sin(3 * z + own[at])
    torch.testing.assert_close(x / 4.0, z, rtol=1e-9, atol=1e-9)


# Sound ---------------------------------------------------------------------------------------------------------------


def test_a_sample_brings_the_sound_of_the_stock_pipeline(h3: Loaded) -> None:
    request = h3.request(h3.family.sampling())
    with h3.ours.evaluating():
        videos = h3.ours.decode(h3.sample(request), request.params)
    assert isinstance(videos, Videos) and videos.audio is not None
    with torch.no_grad():
        _, expected = h3.stock(**h3.family.call(request), num_inference_steps=5, output_type="pt")
    own = videos.select([0]).audio
    assert own is not None and own.sample_rate == h3.stock.audio_sampling_rate
    assert own.waveform.shape == (expected.shape[2], 2)
    assert relative(own.waveform, expected[0].T) <= 1e-4
    assert not torch.allclose(own.waveform[:, 0], own.waveform[:, 1])


def test_sound_is_as_long_as_the_video(h3: Loaded) -> None:
    adapter: Any = h3.ours.adapter
    for num_frames in (22, 124, 345):
        assert adapter.audio_shape(h3.family.sampling(num_frames=num_frames))[1] == round(num_frames / 24 * 40)


def test_both_streams_shape_each_other(h3: Loaded) -> None:
    params = h3.family.sampling()
    request = h3.request(params)
    adapter: Any = h3.ours.adapter
    video, audio = adapter.part_slices(params)
    sigma, step = torch.full((3,), 0.7), torch.zeros(3, dtype=torch.int64)
    with h3.ours.evaluating():
        conditions = h3.ours.encode({"text": Texts(texts=request.texts)}, params)
        base = h3.ours.velocity(conditions, request.noise, sigma, step, params)
        for changed, other in ((video, audio), (audio, video)):
            x = request.noise.clone()
            x[:, changed] *= 0.5
            moved = h3.ours.velocity(conditions, x, sigma, step, params)
            assert not torch.allclose(moved[:, other], base[:, other], atol=1e-5)


def test_the_shifts_of_the_folder_say_the_scale_of_the_sound(h3: Loaded, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(h3.folder, tmp_path / "other"))
    (folder / "audio_scheduler" / "scheduler_config.json").write_text(json.dumps({"shift": 6.0}))
    assert MiniMaxH3Bundle(str(folder)).shift_ratio == 2.0


# Decoding ------------------------------------------------------------------------------------------------------------


def decoded(loaded: Loaded, side: int, **options: Any) -> Tensor:
    own = loaded.family.pipeline(MiniMaxH3Bundle(str(loaded.folder), shortest_s=0.0, **options), loaded.ours.strategy)
    params = loaded.family.sampling(height=side, width=side)
    noise = torch.randn(1, *own.latent_shape(params), generator=torch.Generator().manual_seed(0))
    with own.evaluating():
        media: Any = own.decode(noise, params)
    return media.frames


def test_tiles_of_other_sizes_cover_the_video(h3: Loaded) -> None:
    whole, tiles = (decoded(h3, 96, vae_tile_pixels=pixels) for pixels in (256, 32))
    assert whole.shape == tiles.shape == (22, 3, 96, 96)
    assert torch.equal(whole, decoded(h3, 96)) and not torch.equal(whole, tiles)


def test_weights_that_autocast_rounds_are_kept_rounded(h3: Loaded) -> None:
    """The same bits as autocast over float32 weights, which is how the stock pipeline decodes on a GPU."""
    half: Any = MiniMaxH3Bundle(str(h3.folder), vae_dtype="bf16", shortest_s=0.0)
    whole: Any = h3.ours.bundle
    assert half.vae.decoder.proj_in.weight.dtype == torch.bfloat16 != whole.vae.decoder.proj_in.weight.dtype
    latents = torch.randn(1, 8, 7, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, expected = (each.vae.decode(latents).sample for each in (half, whole))
    assert torch.equal(found, expected)
    adapter: Any = h3.family.pipeline(half, h3.ours.strategy).adapter
    own: Any = h3.ours.adapter
    with torch.no_grad():
        pixels = [each._decoded_at_once(latents) for each in (adapter, own)]
    assert 1e-4 < relative(*pixels) < 5e-2


# Texts ---------------------------------------------------------------------------------------------------------------


def test_of_the_text_encoder_only_what_is_read_is_kept(h3: Loaded) -> None:
    kept: Any = h3.ours.bundle
    encoder = kept.text.encoders["text_encoder"]
    whole = h3.stock.text_encoder
    assert len(encoder.layers) == LAYER == h3.stock.text_encoder_layer < len(whole.model.language_model.layers)
    ids = torch.tensor([h3.stock.tokenizer("two dogs", add_special_tokens=False).input_ids])
    with torch.no_grad():
        expected = whole.model(input_ids=ids, output_hidden_states=True).hidden_states[LAYER]
        found = kept.text.encode(["two dogs", "a cat that is longer"], 1)
    torch.testing.assert_close(found.embeds[:1, : ids.shape[1]], expected)
    assert found.mask.sum(dim=1).tolist() == [8, 20]


def test_a_text_encoder_with_too_few_layers_is_refused(h3: Loaded, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(h3.folder, tmp_path / "short"))
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = LAYER
    config["text_config"].pop("layer_types", None)
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"short has 50 layers; MiniMax-H3 reads the output of layer 50, before"):
        MiniMaxH3Bundle(str(folder))


def test_prompts_without_words_and_images_are_refused(h3: Loaded) -> None:
    params = h3.family.sampling()
    with pytest.raises(DataError, match="the prompt '' has no words"):
        h3.ours.encode({"text": Texts(texts=[""])}, params)
    image = Images(pixels=torch.zeros(1, 3, 32, 32))
    with pytest.raises(ConfigError, match=r"MiniMax-H3 reads \['text'\] of a request, which also brings \{'image'"):
        h3.ours.encode({"text": Texts(texts=["a"]), "image": image}, params)


# What is asked -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 30}, r"num_frames = 30 is not 17 k \+ 5 .* Use num_frames = 22 or 39"),
        ({"num_frames": 5}, r"num_frames = 5 is not 17 k \+ 5 with k of 1 or more .* Use num_frames = 22 or 39"),
        ({"height": 40}, "height = 40 is not a multiple of 16"),
        ({"guidance_scale": 3.0, "negative_prompt": "bad"}, "guidance_scale = 3.0 means nothing to MiniMax-H3"),
        ({"max_sequence_length": 64}, "max_sequence_length = 64 means nothing to MiniMax-H3"),
    ],
)
def test_what_the_model_does_not_have_is_refused(h3: Loaded, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        h3.ours.latent_shape(h3.family.sampling(**changes))


def test_lengths_are_those_that_the_model_was_trained_on() -> None:
    assert rules.seconds_problem(124, 5.0, 15.0) is None and rules.seconds_problem(345, 5.0, 15.0) is None
    assert rules.seconds_problem(22, 0.0, 15.0) is None
    for num_frames in (107, 362):
        problem = rules.seconds_problem(num_frames, 5.0, 15.0)
        assert problem is not None and f"{num_frames / 24:.1f} s;" in problem
        assert "Use num_frames = 124 to 345, or" in problem
    stock: Any = diffusers.MiniMaxH3ModularPipeline
    assert stock.min_duration.fget(None) == 5.0 and stock.max_duration.fget(None) == 15.0
    assert stock.fps.fget(None) == rules.FPS


def test_a_length_that_the_model_was_not_trained_on_is_refused(h3: Loaded) -> None:
    pipeline = h3.family.pipeline(MiniMaxH3Bundle(str(h3.folder)), h3.ours.strategy)
    with pytest.raises(ConfigError, match="num_frames = 22 are 0.9 s; MiniMax-H3 was trained on videos of 5 to 15 s"):
        pipeline.latent_shape(h3.family.sampling())


def test_check_reads_the_factors_of_a_folder(h3: Loaded) -> None:
    adapter: Any = h3.ours.adapter
    assert _latent_divisor(str(h3.folder), 32, 0) == adapter.geometry.vae_factor * adapter.geometry.patch == 16


# Folders -------------------------------------------------------------------------------------------------------------


def test_an_export_says_that_its_components_lie_in_it(h3: Loaded, tmp_path: Path) -> None:
    """So that diffusers does not load those of the folder that the model was trained from."""
    bundle: Any = h3.ours.bundle
    state = {"transformer": {name: p.detach() + 1 for name, p in bundle.transformer.named_parameters()}}
    bundle.export_merged(str(tmp_path / "merged"), state)
    pipeline = diffusers.ModularPipeline.from_pretrained(str(tmp_path / "merged"), workflow="t2va")
    pipeline.load_components(names=["transformer", "vae", "scheduler", "audio_scheduler"])
    for name, parameter in pipeline.transformer.named_parameters():
        assert torch.equal(parameter, state["transformer"][name])
    assert pipeline.audio_scheduler.config["shift"] == 3.0
    index = json.loads((tmp_path / "merged" / "modular_model_index.json").read_text())
    assert index["transformer_ref"][2]["pretrained_model_name_or_path"] is None


def test_what_is_not_read_is_not_downloaded(h3: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(hub_id: str, patterns: list[str]) -> Path:
        asked.extend(patterns)
        return h3.folder

    monkeypatch.setattr(loading, "_download", download)
    MiniMaxH3Bundle("MiniMaxAI/MiniMax-H3")
    assert asked[0] == "modular_model_index.json"
    assert {"transformer/*", "audio_scheduler/*", "tokenizer/*"} < set(asked)
    assert not {"transformer_ref/*", "processor/*"} & set(asked)


def test_an_older_diffusers_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("diffusers.models.transformers.transformer_minimax_h3.MiniMaxH3Transformer3DModel")
    monkeypatch.delitem(sys.modules, "unirl.models.minimax_h3.bundle")
    with pytest.raises(ImportError, match=r"MiniMax-H3 needs diffusers 0.40 or later.*pip install 'diffusers>=0.40'"):
        importlib.import_module("unirl.models.minimax_h3.bundle")
