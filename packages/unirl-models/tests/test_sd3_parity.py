"""SD3 against diffusers' StableDiffusion3Pipeline on the same files: float32, one CPU thread, seed 0 weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import diffusers
import pytest
import torch

from unirl.models.sd3.bundle import SD3Bundle
from unirl.models.sd3.pipeline import SD3Pipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import initial_noise
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Texts, Videos
from unirl.types.sampling import DiffusionSamplingParams

PROMPTS = ["a red cat", "two blue dogs on a hill", "fog"]


def _params(guidance_scale: float = 4.5, **changes: Any) -> DiffusionSamplingParams:
    fields: dict[str, Any] = {
        "num_inference_steps": 6,
        "negative_prompt": "blurry",
        "height": 32,
        "width": 24,
        "eta": 0.0,
        "autocast_precision": "fp32",
        "max_sequence_length": 24,
    }
    return DiffusionSamplingParams(guidance_scale=guidance_scale, **{**fields, **changes})


def _sample(pipeline: SD3Pipeline, params: DiffusionSamplingParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Initial noise, final latents, pixels."""
    with pipeline.evaluating():
        conditions = pipeline.encode({"text": Texts(texts=PROMPTS)}, params)
        noise = initial_noise(PROMPTS, params.seed, pipeline.latent_shape(params))
        segment = pipeline.diffuse(conditions, noise, pipeline.sigmas(params), params, noise_keys=PROMPTS)
        media = pipeline.decode(segment.clean_latents, params)
    assert isinstance(media, Images)
    return noise, segment.clean_latents, media.pixels


def _reference_call(params: DiffusionSamplingParams, noise: torch.Tensor) -> dict[str, Any]:
    return {
        "prompt": PROMPTS,
        "negative_prompt": [params.negative_prompt] * len(PROMPTS),
        "guidance_scale": params.guidance_scale,
        "height": params.height,
        "width": params.width,
        "max_sequence_length": params.max_sequence_length,
        "num_inference_steps": params.num_inference_steps,
        "latents": noise.clone(),
    }


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("convention", ["linear", "diffusers"])
def test_deterministic_sampling_equals_diffusers(
    sd3_bundle: SD3Bundle, reference: Any, guidance_scale: float, convention: Literal["linear", "diffusers"]
) -> None:
    """1e-5 relative: the negative prompt is encoded once here and three times there, which rounds differently."""
    pipeline = SD3Pipeline(sd3_bundle, FlowSDEStrategy(), convention)
    params = _params(guidance_scale)
    noise, latents, pixels = _sample(pipeline, params)
    # A shift of 1 leaves the sigmas that are passed as they are.
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    reference.scheduler = scheduler
    call = _reference_call(params, noise) | {"sigmas": pipeline.sigmas(params)[:-1].tolist()}
    with torch.no_grad():
        expected = reference(**call, output_type="latent").images
        expected_pixels = reference(**call, output_type="pt").images
    assert _relative(latents, expected) < 1e-5
    assert _relative(pixels, expected_pixels) < 1e-5
    assert pixels.shape == (3, 3, 32, 24)


def test_the_diffusers_convention_is_the_stock_pipeline(sd3_bundle: SD3Bundle, reference: Any) -> None:
    pipeline = SD3Pipeline(sd3_bundle, FlowSDEStrategy(), "diffusers")
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler.from_config(sd3_bundle.scheduler_config)
    reference.scheduler = scheduler
    params = _params()
    noise, latents, _ = _sample(pipeline, params)
    with torch.no_grad():
        expected = reference(**_reference_call(params, noise), output_type="latent").images
    assert _relative(latents, expected) < 1e-5


@pytest.mark.parametrize("fixture", ["sd3_folder", "sd3_without_t5"])
def test_encoding_equals_diffusers_bit_for_bit(fixture: str, request: pytest.FixtureRequest) -> None:
    from .tiny import load_reference

    folder = request.getfixturevalue(fixture)
    long_prompt = "a very long prompt " * 5
    prompts = [*PROMPTS, "", long_prompt]
    pipeline = SD3Pipeline(SD3Bundle(str(folder)), FlowSDEStrategy())
    conditions = pipeline.encode({"text": Texts(texts=prompts)}, _params(1.0))
    reference = load_reference(folder, has_t5=fixture == "sd3_folder")
    with torch.no_grad():  # attention takes another kernel where gradients are on
        embeds, _, pooled, _ = reference.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=24
        )
    condition: Any = conditions["text"]
    assert torch.equal(condition.embeds, embeds) and torch.equal(condition.pooled, pooled)
    assert condition.embeds.shape == (5, 77 + 24, 48)


def test_the_timestep_fed_is_1000_sigma_without_truncation(
    sd3_bundle: SD3Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = SD3Pipeline(sd3_bundle, FlowSDEStrategy())
    fed: list[torch.Tensor] = []
    forward: Callable[..., Any] = sd3_bundle.transformer.forward

    def spy(**arguments: Any) -> Any:
        fed.append(arguments["timestep"])
        return forward(**arguments)

    monkeypatch.setattr(sd3_bundle.transformer, "forward", spy)
    params = _params()
    _sample(pipeline, params)
    assert len(fed) == params.num_inference_steps  # guidance costs rows, not calls
    assert torch.equal(torch.stack([t[0] for t in fed]), pipeline.sigmas(params)[:-1] * 1000)
    assert all(t.shape == (6,) and t.dtype == torch.float32 for t in fed)


def test_mixed_precision_runs_the_model_in_bf16_and_the_kernel_in_fp32(sd3_bundle: SD3Bundle) -> None:
    """Replay equals rollout here too: same rows, same autocast."""
    pipeline = SD3Pipeline(sd3_bundle, FlowSDEStrategy())
    params = _params(eta=0.7, autocast_precision="bf16", trajectory_precision="fp16")
    with pipeline.evaluating():
        conditions = pipeline.encode({"text": Texts(texts=PROMPTS)}, params)
        noise = initial_noise(PROMPTS, 0, pipeline.latent_shape(params))
        segment = pipeline.diffuse(conditions, noise, pipeline.sigmas(params), params, noise_keys=PROMPTS)
    assert segment.latents.dtype == torch.float16 and segment.sde_logp is not None
    replayed = pipeline.replay(conditions, segment, torch.arange(3), torch.full((3,), 2), params)
    assert replayed.logp_R.dtype == replayed.mean.dtype == torch.float32
    assert torch.equal(replayed.logp_R.detach(), segment.sde_logp[:, 2])
    assert replayed.q_R is not None
    widths = segment.sigmas[2] - segment.sigmas[3]
    torch.testing.assert_close(replayed.q_R * widths.sqrt(), replayed.std_R)


def test_a_half_precision_checkpoint_samples_in_its_own_dtype(sd3_folder: Path) -> None:
    bundle = SD3Bundle(str(sd3_folder), dtype="bf16", text_encoder_dtype="fp32", vae_dtype="fp32")
    assert bundle.transformer.dtype == torch.bfloat16
    assert bundle.vae.dtype == torch.float32
    _, latents, pixels = _sample(SD3Pipeline(bundle, FlowSDEStrategy()), _params())
    assert latents.dtype == pixels.dtype == torch.float32 and bool(pixels.isfinite().all())


def test_decoding_in_slices_equals_decoding_at_once(sd3_bundle: SD3Bundle) -> None:
    latents = torch.randn(5, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = SD3Pipeline(sd3_bundle, FlowSDEStrategy(), decode_batch_size=8).decode(latents, _params())
    sliced = SD3Pipeline(sd3_bundle, FlowSDEStrategy(), decode_batch_size=2).decode(latents, _params())
    assert isinstance(whole, Images) and isinstance(sliced, Images)
    torch.testing.assert_close(sliced.pixels, whole.pixels, rtol=1e-5, atol=1e-6)


def test_encoding_images_is_diffusers_image_to_image_preparation(sd3_bundle: SD3Bundle, reference: Any) -> None:
    images = torch.rand(3, 3, 32, 24, generator=torch.Generator().manual_seed(0))
    found = SD3Pipeline(sd3_bundle, FlowSDEStrategy(), decode_batch_size=2).encode_media(Images(pixels=images))
    vae = reference.vae
    with torch.no_grad():
        posterior = vae.encode(reference.image_processor.preprocess(images)).latent_dist
    expected = (posterior.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    assert found.dtype == torch.float32 and not found.requires_grad
    assert tuple(found.shape[1:]) == SD3Pipeline(sd3_bundle, FlowSDEStrategy()).latent_shape(_params())
    # Slices of a batch round differently.
    assert _relative(found, expected) < 1e-5


def test_only_images_are_encoded(sd3_bundle: SD3Bundle) -> None:
    with pytest.raises(ConfigError, match="SD3 encodes images, got Videos"):
        SD3Pipeline(sd3_bundle, FlowSDEStrategy()).encode_media(Videos.pack(frames=[torch.rand(2, 3, 32, 24)]))
