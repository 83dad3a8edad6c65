"""Latents from real engines, fp32 on a CPU: the samples are those of the model that trains."""

import pytest
import torch
from shapes_sd3 import CHECKPOINT, direct, pipeline_of, push, replay_gap, request

from unirl.models.sd3.bundle import SD3Bundle
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy
from unirl.types.errors import ConfigError, WeightSyncError

pytestmark = [pytest.mark.slow]

TOLERANCE = 1e-4
"""For latents of a few units after six steps in float32: an engine adds in another order than we do, CPUs differ in it
too, and guidance multiplies what that changes. Other weights are 1000 times further away."""
LOGP_TOLERANCE = 2e-5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sde_indices": [1, 3]},
        {"sde_indices": [2], "keep_latents": "all"},
        {"eta": 0.0},
        {"guidance_scale": 3.0, "negative_prompt": ""},
    ],
    ids=["every-step", "some-steps", "all-latents", "deterministic", "guided"],
)
def test_the_samples_are_those_of_the_model_that_trains(painter, shapes, changes):
    req = request(shapes, **changes)
    track = painter.generate(req).tracks["image"]
    expected, found = direct(shapes, req), track.segment
    assert (found.indices, found.sde_indices) == (expected.indices, expected.sde_indices)
    assert float((found.latents - expected.latents).abs().max()) < TOLERANCE
    assert (found.sde_logp is None) == (expected.sde_logp is None)
    if expected.sde_logp is not None:
        assert float((found.sde_logp - expected.sde_logp).abs().max()) < LOGP_TOLERANCE
        assert float(replay_gap(shapes, track).max()) < LOGP_TOLERANCE
    assert track.decoded.pixels.shape == (6, 3, 32, 32)
    assert track.policy_versions.tolist() == [painter.policy_version] * 6


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        (CPSSDEStrategy(), {"eta": 0.7}),
        (DanceSDEStrategy(), {"eta": 0.3}),
        (DDIMStrategy(), {"eta": 0.5, "sde_indices": [0, 2, 4]}),
    ],
    ids=["cps", "dance", "ddim"],
)
def test_steps_of_other_kernels_are_sampled_too(painter, shapes, strategy, changes):
    if strategy.name not in painter.kernels:
        pytest.skip(f"{painter.codec.engine} has no kernel {strategy.name}")
    pipeline = pipeline_of(strategy, shapes.bundle)
    painter._pipeline = pipeline
    try:
        req = request(pipeline, **changes)
        track = painter.generate(req).tracks["image"]
        expected = direct(pipeline, req)
    finally:
        painter._pipeline = shapes
    assert float((track.segment.latents - expected.latents).abs().max()) < TOLERANCE
    assert float((track.segment.sde_logp - expected.sde_logp).abs().max()) < LOGP_TOLERANCE


def test_a_sample_does_not_depend_on_its_batch(painter, shapes):
    req = request(shapes, num=11)  # chunks of 8 and 3
    whole = painter.generate(req).tracks["image"].segment
    alone = painter.generate(req.slice(9, 10)).tracks["image"].segment
    assert float((whole.latents[9] - alone.latents[0]).abs().max()) < TOLERANCE
    assert not torch.equal(whole.latents[9], whole.latents[8])


def test_what_it_does_not_serve_is_refused_before_anything_is_sampled(painter, shapes):
    named = painter.codec.engine
    with pytest.raises(ConfigError, match=f"sampling.post_solver = dpmpp_2m is not served by {named}"):
        painter.generate(request(shapes, sde_indices=[0], post_solver="dpmpp_2m"))
    with pytest.raises(WeightSyncError, match="samples of the policy 'old' are asked for"):
        painter.generate(request(shapes), "old")


def test_a_kernel_that_it_lacks_is_refused(painter, shapes):
    if "dance" in painter.kernels:
        pytest.skip(f"{painter.codec.engine} has it")
    painter._pipeline = pipeline_of(DanceSDEStrategy(), shapes.bundle)
    try:
        with pytest.raises(ConfigError, match=r"kernels \['cps', 'flow'\], the trainer replays with 'dance'"):
            painter.generate(request(painter._pipeline))
    finally:
        painter._pipeline = shapes


def test_half_precision_is_honoured(served):
    bundle = SD3Bundle(str(CHECKPOINT), dtype="bf16")
    pipeline = pipeline_of(bundle=bundle)
    engine = served.start(pipeline, CHECKPOINT, dtype="bf16")
    try:
        assert engine.ready().dtype == "torch.bfloat16"
        tensors = {name: tensor * 1.02 for name, tensor in bundle.transformer.state_dict().items()}
        assert push(engine, tensors, 1).num_bound == engine.ready().num_parameters
        bundle.transformer.load_state_dict(tensors)
        req = request(pipeline, sde_indices=[1, 3])
        track = engine.generate(req).tracks["image"]
        expected = direct(pipeline, req)
        # Of a last place of 2^-8 in each of six forwards; float32 is 1000 times closer.
        assert float((track.segment.latents - expected.latents).abs().max()) < 0.1
        assert float(replay_gap(pipeline, track).max()) < 1e-3
    finally:
        engine.shutdown()
