"""Edits of given images by a real engine are those of the model that trains: the shipped Qwen-Image-Edit."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from served_engines import SERVED, marked
from shapes_sd3 import direct, push, replay_gap, request

import unirl.worlds.shapes
from unirl.models.qwen_image_edit.bundle import QwenImageEditBundle
from unirl.models.qwen_image_edit.pipeline import QwenImageEditPipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.types.media import ImageLists

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CHECKPOINT = Path(next(iter(unirl.worlds.shapes.__path__))) / "edits" / "checkpoint"
GUIDED: dict[str, Any] = {"guidance_scale": 3.0, "negative_prompt": "bad"}
CASES: list[dict[str, Any]] = [{}, {"sde_indices": [1, 3]}, {"eta": 0.0}, GUIDED]


def edits(pipeline: Any, *, seed: int = 0, **changes: Any) -> Any:
    """A request whose images have two aspect ratios, in turn."""
    generator = torch.Generator().manual_seed(seed)
    req = request(pipeline, max_sequence_length=None, **changes)
    sizes = [(32, 32), (32, 64)]
    images = [[torch.rand(3, *sizes[row % 2], generator=generator)] for row in range(req.batch_size)]
    return dataclasses.replace(req, primitives={**req.primitives, "image": ImageLists(images=images)})


@pytest.mark.parametrize("engine_name", [marked("vllm_omni")])
def test_edits_are_those_of_the_model_that_trains(engine_name):
    bundle = QwenImageEditBundle(str(CHECKPOINT), image_area=1024, condition_area=1024)
    pipeline: Any = QwenImageEditPipeline(
        bundle, FlowSDEStrategy(), SigmaSchedule(convention="linear", shift=3.0), decode_batch_size=48
    )
    engine = SERVED[engine_name].start(pipeline, CHECKPOINT)
    try:
        for more in CASES:
            req = edits(pipeline, **more)
            track = engine.generate(req).tracks["image"]
            expected, found = direct(pipeline, req), track.segment
            assert float((found.latents - expected.latents).abs().max()) < 1e-4
            if expected.sde_logp is not None:
                assert float(replay_gap(pipeline, track).max()) < 1e-6
        others = engine.generate(edits(pipeline, seed=1, **GUIDED)).tracks["image"].segment
        assert float((others.latents - found.latents).abs().max()) > 1e-2
        weights = {key: tensor * 1.05 for key, tensor in bundle.transformer.state_dict().items()}
        push(engine, weights, 1)
        bundle.transformer.load_state_dict(weights)
        req = edits(pipeline)
        found = engine.generate(req).tracks["image"].segment.latents
        assert float((found - direct(pipeline, req).latents).abs().max()) < 1e-4
    finally:
        engine.shutdown()
