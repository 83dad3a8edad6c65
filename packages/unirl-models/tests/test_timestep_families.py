"""What only SDXL, CogVideoX and Sana have: their levels, and folders and requests that do not fit."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.sde.kernels import DDIMStrategy
from unirl.sde.noise import initial_noise, step_noise
from unirl.sde.schedule import SigmaSchedule
from unirl.sde.timesteps import TimestepSchedule
from unirl.sde.variance_preserving import from_flow
from unirl.types.errors import ConfigError
from unirl.types.media import Texts, Videos

from .families.kit import KEYS, TEXTS, Loaded, families, relative, stock_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny folder of a family, written once."""
    root = tmp_path_factory.mktemp("timesteps")

    def of(name: str) -> Path:
        if not (root / name).exists():
            families()[name].tiny().save_pretrained(root / name)
        return root / name

    return of


def pipeline(name: str, path: Path, **options: Any) -> DiffusersPipeline:
    family = families()[name]
    return family.pipeline(family.bundle(str(path)), DDIMStrategy(), **options)


@pytest.fixture
def changed(folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str, str, Mapping[str, Any]], Path]:
    """A copy of a family's folder with other values in one JSON file; weights are links."""

    def change(name: str, file: str, values: Mapping[str, Any]) -> Path:
        for source in folder(name).rglob("*"):
            target = tmp_path / source.relative_to(folder(name))
            if source.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            elif source.relative_to(folder(name)) == Path(file):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(json.dumps(json.loads(source.read_text()) | values))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)
        return tmp_path

    return change


def test_every_latent_of_a_stochastic_trajectory_is_that_of_the_stock_ddim_scheduler(folder):
    """SDXL under DDIM: the same U-Net, noise and eta = 1, four steps and the last without noise."""
    diffusers: Any = pytest.importorskip("diffusers")
    ours = pipeline("sdxl", folder("sdxl"))
    family = families()["sdxl"]
    params = family.sampling(guidance_scale=1.0, eta=1.0, sde_indices=[0, 1, 2, 3], keep_latents="all")
    adapter: Any = ours.adapter
    noise = initial_noise(KEYS, params.seed, ours.latent_shape(params))
    scheduler = diffusers.DDIMScheduler.from_config(
        adapter.bundle.scheduler_config, clip_sample=False, set_alpha_to_one=True
    )
    scheduler.set_timesteps(params.num_inference_steps)
    with ours.evaluating():
        conditions = ours.encode({"text": Texts(texts=list(TEXTS))}, params)
        sigmas = ours.sigmas(params)
        segment = ours.diffuse(conditions, noise, sigmas, params, noise_keys=KEYS)
        z = noise
        for index, timestep in enumerate(scheduler.timesteps):
            at = from_flow(segment.latents[:, index], sigmas[index : index + 1].expand(3))
            torch.testing.assert_close(at, z, rtol=2e-5, atol=2e-5)
            output = adapter.model_output(z, timestep.expand(3), conditions, params)
            drawn = step_noise(KEYS, index, params.seed, z.shape[1:])
            z = scheduler.step(output, timestep, z, eta=1.0, variance_noise=drawn, return_dict=False)[0]
    torch.testing.assert_close(segment.clean_latents, z, rtol=2e-5, atol=2e-5)
    assert segment.sde_logp is not None and torch.isfinite(segment.sde_logp).all()


def test_the_default_of_every_step_is_refused_where_the_last_has_no_noise(folder):
    ours = pipeline("sdxl", folder("sdxl"))
    params = families()["sdxl"].sampling(guidance_scale=1.0)
    noise = initial_noise(KEYS, params.seed, ours.latent_shape(params))
    with ours.evaluating(), pytest.raises(ValueError, match="ddim kernel adds no noise on the step to sigma = 0"):
        conditions = ours.encode({"text": Texts(texts=list(TEXTS))}, params)
        ours.diffuse(conditions, noise, ours.sigmas(params), params, noise_keys=KEYS)


def test_a_schedule_is_the_checkpoints_another_spacing_or_refused(folder):
    path = folder("cogvideox")
    own = pipeline("cogvideox", path).schedule
    assert isinstance(own, TimestepSchedule) and own.timestep_spacing == "trailing" and own.snr_shift_scale == 3.0
    leading = pipeline("cogvideox", path, schedule="leading").schedule
    assert isinstance(leading, TimestepSchedule) and leading.timestep_spacing == "leading"
    with pytest.raises(ConfigError, match="schedule = 'linear' is of flow matching; CogVideoX knows integer timesteps"):
        pipeline("cogvideox", path, schedule="linear")
    with pytest.raises(ConfigError, match="schedule = 'trailing' spaces integer timesteps, which Sana has none of"):
        pipeline("sana", folder("sana"), schedule="trailing")


def test_sigmas_of_flow_matching_are_refused_before_the_model_runs(folder):
    ours = pipeline("sdxl", folder("sdxl"), schedule=SigmaSchedule("linear"))
    params = families()["sdxl"].sampling(guidance_scale=1.0, eta=0.0)
    noise = initial_noise(KEYS, params.seed, ours.latent_shape(params))
    with ours.evaluating(), pytest.raises(ValueError, match=r"sigmas \[1.0.* are not levels of the model's 1000"):
        conditions = ours.encode({"text": Texts(texts=list(TEXTS))}, params)
        ours.diffuse(conditions, noise, ours.sigmas(params), params, noise_keys=KEYS)


SCHEDULER = "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("name", "file", "values", "message"),
    [
        ("sdxl", SCHEDULER, {"prediction_type": "flow"}, "prediction_type = 'flow' is not one of"),
        ("sdxl", SCHEDULER, {"rescale_betas_zero_snr": True}, "prediction_type = 'epsilon' says nothing"),
        ("sdxl", SCHEDULER, {"use_karras_sigmas": True}, "sets ['use_karras_sigmas']"),
        ("sdxl", "vae/config.json", {"latents_mean": [0.0] * 4}, "latents with a mean per channel"),
        ("sdxl", "unet/config.json", {"time_cond_proj_dim": 8}, "time_cond_proj_dim = 8 is not the base model"),
        ("sana", "transformer/config.json", {"guidance_embeds": True}, "embeds its guidance (Sana-Sprint)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(changed, name, file, values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        pipeline(name, changed(name, file, values))


def test_requests_that_do_not_fit_are_named(folder):
    video = families()["cogvideox"]
    ours = pipeline("cogvideox", folder("cogvideox"))
    for changes, message in (
        ({"num_frames": 8}, "num_frames = 8 is not 4 k"),
        ({"num_frames": 13}, "num_frames = 13 is not 8 k .*Use num_frames = 9 or 17"),
        ({"height": 24}, "height = 24 is not a multiple of 16"),
        ({"max_sequence_length": 8}, "max_sequence_length = 8 means nothing to CogVideoX"),
    ):
        with pytest.raises(ConfigError, match=message):
            ours.latent_shape(video.sampling(**changes))


def test_cogvideox_15_samples_one_latent_frame_more_than_it_decodes(folder):
    ours, params = pipeline("cogvideox15", folder("cogvideox15")), families()["cogvideox15"].sampling()
    shape = ours.latent_shape(params)
    assert shape[1] == 4 and ours.adapter.image_seq_len(params) == 2 * 2 * 2
    latents = initial_noise(KEYS, 0, shape)
    with ours.evaluating():
        videos = ours.decode(latents, params)
        assert isinstance(videos, Videos) and videos.batch_size == 3 and len(videos.frames) == 3 * 9
        encoded = ours.encode_media(videos)
    assert encoded.shape == (3, *shape) and torch.equal(encoded[:, :, 0], encoded[:, :, 1])


def test_sdxl_guides_against_zeros_as_the_stock_pipeline_without_a_negative_prompt(folder):
    family, path = families()["sdxl"], folder("sdxl")
    loaded = Loaded(family, path, pipeline("sdxl", path), stock_of(path))
    assert loaded.stock.config.force_zeros_for_empty_prompt
    zeros = family.sampling(negative_prompt="", sampler_kwargs={"zeros_for_empty_prompt": True})
    request = loaded.request(zeros)
    call = {name: value for name, value in family.call(request).items() if name != "negative_prompt"}
    with torch.no_grad():
        expected = loaded.stock(
            **call, num_inference_steps=zeros.num_inference_steps, output_type="latent", return_dict=False
        )[0]
    assert relative(loaded.sample(request), expected) <= family.tolerance
    # An encoded empty prompt is another model.
    encoded = loaded.sample(loaded.request(family.sampling(negative_prompt="")))
    assert relative(encoded, expected) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"negative_prompt": "blurred"}, "replaces an empty negative prompt, and sampling.negative_prompt"),
        ({"sampler_kwargs": {"zeros_for_empty_prompt": 1}}, "zeros_for_empty_prompt = 1 must be true or false"),
    ],
)
def test_zeros_that_cannot_be_taken_are_refused(folder, changes, message):
    fields = {"negative_prompt": "", "sampler_kwargs": {"zeros_for_empty_prompt": True}, **changes}
    with pytest.raises(ConfigError, match=message):
        pipeline("sdxl", folder("sdxl")).latent_shape(families()["sdxl"].sampling(**fields))
