"""What only LTX-2 has: sound next to the video."""

from typing import Any

import pytest
import torch

from unirl.models.tiny.ltx2 import AUDIO_PER_SECOND, FPS
from unirl.types.errors import ConfigError
from unirl.types.media import Texts, Videos

from .families.kit import Loaded, load, pinned, relative


@pytest.fixture(scope="module")
def ltx2(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load("ltx2_t2v", tmp_path_factory.mktemp("ltx2") / "ltx2")


def test_a_sample_brings_the_sound_of_the_stock_pipeline(ltx2: Loaded) -> None:
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
    assert found.shape == (3, expected.shape[2], 2) and videos.audio.sample_rate == 400
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
