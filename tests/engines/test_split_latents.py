"""One instance of a real engine of latents over two processes of a CPU: its samples and pushes are those of one."""

from pathlib import Path
from typing import Any

import pytest
from served_engines import SERVED, marked, nightly
from shapes_sd3 import CHECKPOINT, direct, push, replay_gap, request
from test_served_latents import LOGP_TOLERANCE, TOLERANCE
from test_served_unified import MODELS, check_pushes, check_trajectories
from test_served_weights import gap, state

import unirl.worlds.shapes
from unirl.models.flux2_klein.bundle import Flux2KleinBundle
from unirl.models.flux2_klein.pipeline import Flux2KleinPipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.schedule import SigmaSchedule

pytestmark = [pytest.mark.slow]
NUM_PARAMETERS = {"sglang": 95, "vllm_omni": 70}
"""Parameters held by one process."""


@pytest.mark.parametrize(
    ("name", "engine_args"),
    [
        marked("sglang", {}),  # by tensors, as the next
        marked("vllm_omni", {}),
        # One process for each branch of guidance.
        nightly(marked("sglang", {"enable_cfg_parallel": True})),
        nightly(marked("vllm_omni", {"cfg_parallel_size": 2, "tensor_parallel_size": 1})),
    ],
    ids=["sglang-by-tensors", "vllm_omni-by-tensors", "sglang-by-branches", "vllm_omni-by-branches"],
)
def test_two_ranks_take_pushes_and_sample_as_one(name, engine_args, shapes):
    engine = SERVED[name].start(shapes, CHECKPOINT, num_devices=2, engine_args=engine_args)
    try:
        for req in (request(shapes), request(shapes, guidance_scale=3.0, negative_prompt="")):
            check_samples(engine, shapes, req)
        receipt = push(engine, state(shapes, 1.1), 1)
        # Of both ranks; vLLM-Omni joins the projections of attention, SGLang counts a buffer too.
        assert receipt.num_bound == engine.ready().num_parameters == 2 * NUM_PARAMETERS[name]
        assert gap(engine, shapes) > 0.1
        push(engine, state(shapes, 1.1), 2)  # the same again: no rank's checksum may change
        push(engine, state(shapes), 3)  # others: that of every rank must
        assert gap(engine, shapes) < TOLERANCE
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    "name",
    [
        nightly(marked("sglang")),  # by the tokens of a latent
        nightly(marked("vllm_omni")),  # by tensors
    ],
)
def test_two_ranks_sample_another_family_as_one(name):
    checkpoint = Path(next(iter(unirl.worlds.shapes.__path__))) / "checkpoint_flux2"
    bundle = Flux2KleinBundle(str(checkpoint))
    pipeline = Flux2KleinPipeline(bundle, FlowSDEStrategy(), SigmaSchedule(convention="linear", shift=3.0))
    engine = SERVED[name].start(pipeline, checkpoint, num_devices=2)
    try:
        check_samples(engine, pipeline, request(pipeline))
        weights = {key: tensor * 1.05 for key, tensor in bundle.transformer.state_dict().items()}
        push(engine, weights, 1)
        bundle.transformer.load_state_dict(weights)
        check_samples(engine, pipeline, request(pipeline))
    finally:
        engine.shutdown()


@pytest.mark.vllm_omni
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_draw_for_a_unified_model_as_one(name, tmp_path):
    """HunyuanImage3's share the experts out, each whole."""
    unified = MODELS[name](tmp_path / name, num_devices=2)
    try:
        check_trajectories(unified, 1)
        check_pushes(unified)
    finally:
        unified.engine.shutdown()


def check_samples(engine: Any, pipeline: Any, req: Any) -> None:
    """Assert that the engine samples as the model that trains, whose replay gives its log-probs."""
    track = engine.generate(req).tracks["image"]
    assert float((track.segment.latents - direct(pipeline, req).latents).abs().max()) < TOLERANCE
    assert float(replay_gap(pipeline, track).max()) < LOGP_TOLERANCE
