"""Other families by real engines sample as the models that train: the shipped FLUX.2 Klein and Wan 2.1, random FLUX.1,
Z-Image, Qwen-Image, HunyuanVideo, 1.5 and Wan 2.2 of two layers."""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from served_engines import SERVED, marked, nightly
from shapes_sd3 import direct, push, replay_gap, request
from test_served_weights import RANK, adapter
from tiny_pipelines import save_qwen_image

import unirl.worlds.moves
import unirl.worlds.shapes
from unirl.models.flux.bundle import FluxBundle, FluxFillBundle, FluxKontextBundle
from unirl.models.flux.pipeline import FluxFillPipeline, FluxKontextPipeline, FluxPipeline
from unirl.models.flux2_klein.bundle import Flux2KleinBundle
from unirl.models.flux2_klein.pipeline import Flux2KleinPipeline
from unirl.models.hunyuan_video.bundle import HunyuanVideoBundle
from unirl.models.hunyuan_video.pipeline import HunyuanVideoPipeline
from unirl.models.hunyuan_video15.bundle import HunyuanVideo15Bundle, HunyuanVideo15ImageBundle
from unirl.models.hunyuan_video15.pipeline import HunyuanVideo15ImagePipeline, HunyuanVideo15Pipeline
from unirl.models.ltx2.bundle import LTX2Bundle
from unirl.models.ltx2.pipeline import LTX2Pipeline
from unirl.models.qwen_image.bundle import QwenImageBundle
from unirl.models.qwen_image.pipeline import QwenImagePipeline
from unirl.models.tiny import flux1, hunyuan_video, hunyuan_video15, ltx2, wan, z_image
from unirl.models.wan.bundle import WanBundle, WanImageBundle
from unirl.models.wan.pipeline import WanImagePipeline, WanPipeline
from unirl.models.z_image.bundle import ZImageBundle
from unirl.models.z_image.pipeline import ZImagePipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.types.adapters import factor_pairs
from unirl.types.media import Images, Texts, Videos
from unirl.types.rollout import RolloutReq
from unirl.types.weights import qualified

pytestmark = [pytest.mark.slow]

TOLERANCE = 1e-4
"""For latents after six steps in float32; the engines have their own transformers for these families."""
KERNELS = Path(__file__).parent / "sglang_cpu_kernels" / "src"
VIDEO = {"num_frames": 5, "max_sequence_length": 64, "height": 16, "width": 16}
LONGER = {"max_sequence_length": 128}
GUIDED = {"guidance_scale": 3.0, "negative_prompt": "bad"}
GUIDED_TWICE = {**GUIDED, "guidance_scale_2": 2.0}
EXPERTS = {"num_frames": 5, "max_sequence_length": 64}
LONG = " ".join(["a picture of"] * 8)
"""Fills more blocks of tokens than the short prompts do, after which Z-Image places its images."""
IMAGES = {"num_frames": 5}
BY_INPUT = {"distilled_guidance_scale": 2.0}
KONTEXT = {**LONGER, **BY_INPUT, "sampler_kwargs": {"keeps_reference_size": True}}
SHORT = {"max_sequence_length": 6}
FILM = {**LONGER, **BY_INPUT, "num_frames": 5, "width": 48}
FIRST = {"num_frames": 5, "height": 32, "width": 64}
FAMILIES: dict[str, Any] = {  # Any: classes of each
    "flux2_klein": (unirl.worlds.shapes, "checkpoint_flux2", Flux2KleinBundle, Flux2KleinPipeline, {}),
    "wan": (unirl.worlds.moves, "checkpoint", WanBundle, WanPipeline, {"num_frames": 5, "max_sequence_length": 7}),
    "flux": (None, flux1.write, FluxBundle, FluxPipeline, {**LONGER, **BY_INPUT, "width": 48}),
    "z_image": (None, z_image.write, ZImageBundle, ZImagePipeline, {**LONGER, "height": 64, "width": 96}),
    "qwen_image": (None, save_qwen_image, QwenImageBundle, QwenImagePipeline, {**LONGER, "width": 64}),
    "wan22": (None, wan.write_two_experts, WanBundle, WanPipeline, EXPERTS),
    "wan_images": (None, wan.write_image_to_video, WanImageBundle, WanImagePipeline, IMAGES),
    "wan22_images": (None, wan.write_image_to_video_experts, WanImageBundle, WanImagePipeline, IMAGES),
    "wan_first_images": (None, wan.write_image_to_video_first_frame, WanImageBundle, WanImagePipeline, FIRST),
    "hunyuan_video": (None, hunyuan_video.write, HunyuanVideoBundle, HunyuanVideoPipeline, FILM),
    "hunyuan_video15": (None, hunyuan_video15.write, HunyuanVideo15Bundle, HunyuanVideo15Pipeline, VIDEO),
    "flux2_klein_images": (unirl.worlds.shapes, "checkpoint_flux2", Flux2KleinBundle, Flux2KleinPipeline, SHORT),
    "flux_kontext_images": (None, flux1.write_kontext, FluxKontextBundle, FluxKontextPipeline, KONTEXT),
    "flux_fill_images": (None, flux1.write_fill, FluxFillBundle, FluxFillPipeline, {**LONGER, **BY_INPUT}),
    "ltx2": (None, ltx2.write, LTX2Bundle, LTX2Pipeline, {"num_frames": 9, "max_sequence_length": 64}),
    "hunyuan_video15_images": (
        None,
        hunyuan_video15.write_image_to_video,
        HunyuanVideo15ImageBundle,
        HunyuanVideo15ImagePipeline,
        VIDEO,
    ),
}
"""World and folder of a shipped checkpoint, or what writes a random one; classes; sampling."""
BY_SGLANG = ("flux", "flux2_klein", "z_image", "qwen_image", "wan22", "wan_images", "wan22_images", "hunyuan_video")
BY_VLLM_OMNI = tuple(name for name in FAMILIES if name not in ("qwen_image", "hunyuan_video"))


def asked(pipeline: Any, name: str, **changes: Any) -> RolloutReq:
    """A request, with images where the family reads some."""
    if not name.endswith("images"):
        return request(pipeline, **changes)
    changes.setdefault("max_sequence_length", None)
    req = request(pipeline, **changes)
    generator = torch.Generator().manual_seed(0)
    given = {"image": Images(pixels=torch.rand(req.batch_size, 3, 40, 56, generator=generator))}
    if "fill" in name:
        given["mask"] = Images(pixels=torch.rand(req.batch_size, 3, 40, 56, generator=generator).round())
    return dataclasses.replace(req, primitives={**req.primitives, **given})


def pixels_of(media: Images | Videos) -> torch.Tensor:
    """uint8, as `media_bits` asks."""
    pixels = media.frames if isinstance(media, Videos) else media.pixels
    assert pixels.dtype == torch.uint8
    return pixels


@pytest.mark.parametrize(
    ("engine_name", "name"),
    [
        marked("sglang", "wan"),
        *(nightly(marked("sglang", name)) for name in BY_SGLANG),
        marked("vllm_omni", "qwen_image"),
        *(nightly(marked("vllm_omni", name)) for name in BY_VLLM_OMNI),
    ],
)
def test_a_family_samples_as_the_model_that_trains(engine_name, name, tmp_path):
    world, source, bundle, pipeline_class, changes = FAMILIES[name]
    if world is None:
        source(checkpoint := tmp_path / name)
    else:
        checkpoint = Path(next(iter(world.__path__))) / source
    pipeline: Any = pipeline_class(
        bundle(str(checkpoint)), FlowSDEStrategy(), SigmaSchedule(convention="linear", shift=3.0)
    )
    engine = SERVED[engine_name].start(pipeline, checkpoint, media_bits=8)
    try:
        guided = [GUIDED_TWICE if name.startswith("wan22") else GUIDED]
        if world is not None or bundle is FluxFillBundle:  # which has no negative prompt
            guided = []
        for more in ({}, {"sde_indices": [1, 3]}, {"eta": 0.0}, *guided):
            req = asked(pipeline, name, **changes, **more)
            if world is None:
                assert isinstance(texts := req.primitives["text"], Texts)
                texts.texts[1::3] = [f"{LONG} {text}" for text in texts.texts[1::3]]
            track = engine.generate(req).tracks["image"]
            expected, found = direct(pipeline, req), track.segment
            assert float((found.latents - expected.latents).abs().max()) < TOLERANCE
            assert found.modality is expected.modality
            shown = pipeline.decode(found.clean_latents, found.params).in_bytes()
            assert isinstance(shown, Videos if "num_frames" in changes else Images)
            assert torch.equal(pixels_of(track.decoded), pixels_of(shown))
            if expected.sde_logp is not None:
                assert float(replay_gap(pipeline, track).max()) < TOLERANCE
        weights = {
            component: {key: tensor * (1.05 + 0.05 * number) for key, tensor in module.state_dict().items()}
            for number, (component, module) in enumerate(pipeline.bundle.trainable_modules().items())
        }
        push(engine, qualified(weights), 1)
        for component, module in pipeline.bundle.trainable_modules().items():
            module.load_state_dict(weights[component])
        req = asked(pipeline, name, **changes)
        found = engine.generate(req).tracks["image"].segment.latents
        assert float((found - direct(pipeline, req).latents).abs().max()) < TOLERANCE
    finally:
        engine.shutdown()


@pytest.mark.parametrize(("engine_name", "name"), [nightly(marked("sglang", "hunyuan_video"))])
def test_an_adapter_of_some_layers_acts_as_its_merged_weights(engine_name, name, tmp_path):
    """An adapter of some of the layers that SGLang joins, and of the text refiner."""
    _, write, bundle, pipeline_class, changes = FAMILIES[name]
    write(checkpoint := tmp_path / name)
    pipeline: Any = pipeline_class(
        bundle(str(checkpoint)), FlowSDEStrategy(), SigmaSchedule(convention="linear", shift=3.0)
    )
    engine = SERVED[engine_name].start(pipeline, checkpoint, max_lora_rank=RANK)
    req = asked(pipeline, name, **changes)
    try:
        bucket, config = adapter(pipeline, 1, 0.1)
        receipt = engine.load_adapter(bucket, config)
        assert (receipt.num_tensors, receipt.num_bound) == (len(bucket.tensors), len(bucket.tensors) // 2)
        found = engine.generate(req).tracks["image"].segment.latents
        assert float((found - direct(pipeline, req).latents).abs().max()) > 0.01
        with torch.no_grad():
            for layer, (a, b) in factor_pairs(bucket.tensors).items():
                pipeline.bundle.transformer.get_submodule(layer).weight += 2 * b @ a
        assert float((found - direct(pipeline, req).latents).abs().max()) < TOLERANCE
    finally:
        engine.shutdown()


def test_the_kernels_of_tests_are_those_of_their_definition():
    sys.path.insert(0, str(KERNELS))
    kernels: Any = importlib.import_module("sglang_cpu_kernels.latents")
    modulated_norm, residual_norm = kernels.modulated_norm, kernels.residual_norm
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(2, 6, 8, generator=generator) for _ in range(2))
    scale, shift, gate = (torch.randn(2, 1, 8, generator=generator) for _ in range(3))
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
    torch.testing.assert_close(modulated_norm(x, None, None, scale, shift, "layer", 1e-6), normed * (1 + scale) + shift)
    by_frame = scale[:, None].expand(2, 3, 1, 8)
    torch.testing.assert_close(
        modulated_norm(x, None, None, by_frame, shift, "layer", 1e-6), normed * (1 + scale) + shift
    )
    out, added = residual_norm(residual, x, gate, None, None, scale, shift, "rms", 1e-6)
    torch.testing.assert_close(added, residual + gate * x)
    norm = added / (added.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(out, norm * (1 + scale) + shift)


@pytest.mark.parametrize("is_neox", [True, False])
def test_the_rotary_embedding_of_tests_turns_pairs_by_their_angles(is_neox):
    sys.path.insert(0, str(KERNELS))
    text: Any = importlib.import_module("sglang_cpu_kernels.text")
    positions, angles = torch.tensor([3, 0, 1]), torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.1])
    query = torch.randn(3, 2 * 6, generator=torch.Generator().manual_seed(0))
    expected = query.view(3, 2, 6).clone()
    for pair, (one, other) in enumerate([(0, 2), (1, 3)] if is_neox else [(0, 1), (2, 3)]):
        for token, position in enumerate(positions.tolist()):
            plane = torch.complex(expected[token, :, one], expected[token, :, other])
            plane = plane * torch.polar(torch.tensor(1.0), angles[position, pair])
            expected[token, :, one], expected[token, :, other] = plane.real, plane.imag
    text.rotary_embedding(positions, query, None, 6, torch.cat([angles.cos(), angles.sin()], dim=-1), is_neox)
    torch.testing.assert_close(query, expected.flatten(1))
