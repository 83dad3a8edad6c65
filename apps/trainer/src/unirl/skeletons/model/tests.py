from pathlib import Path

import pytest
import torch
from my_model import MyModelBundle, MyModelPipeline

from unirl.app.main import main
from unirl.sde import FlowSDEStrategy, SigmaSchedule, initial_noise, transition_rows
from unirl.types.media import Texts
from unirl.types.sampling import DiffusionSamplingParams

HERE = Path(__file__).parent
PARAMS = DiffusionSamplingParams(
    height=16, width=16, num_inference_steps=4, guidance_scale=1.0, eta=0.7, autocast_precision="fp32"
)
KEYS = ["a", "b"]


@pytest.fixture
def pipeline():
    torch.manual_seed(0)
    return MyModelPipeline(MyModelBundle(), FlowSDEStrategy(), SigmaSchedule("linear", shift=3.0))


@pytest.fixture
def sampled(pipeline):
    """Conditions of two prompts, and the trajectories that were sampled from them."""
    with pipeline.evaluating():
        conditions = pipeline.encode({"text": Texts(texts=["a cat", "two dogs"])}, PARAMS)
        start = initial_noise(KEYS, PARAMS.seed, pipeline.latent_shape(PARAMS))
        return conditions, pipeline.diffuse(conditions, start, pipeline.sigmas(PARAMS), PARAMS, noise_keys=KEYS)


def test_replay_gives_the_log_probs_of_the_rollout(pipeline, sampled):
    conditions, segment = sampled
    sample_R, step_R = transition_rows(2, segment.sde_indices)
    replayed = pipeline.replay(conditions, segment, sample_R, step_R, PARAMS)
    torch.testing.assert_close(replayed.logp_R.detach(), segment.sde_logp.flatten(), atol=1e-5, rtol=0)


def test_gradients_reach_every_weight_that_trains(pipeline, sampled):
    conditions, segment = sampled
    sample_R, step_R = transition_rows(2, segment.sde_indices)
    pipeline.replay(conditions, segment, sample_R, step_R, PARAMS).logp_R.sum().backward()
    for module in pipeline.bundle.trainable_modules().values():
        assert [name for name, weight in module.named_parameters() if weight.grad is None] == []


def test_the_recipe_has_no_mistakes(monkeypatch):
    monkeypatch.chdir(HERE)
    assert main(["check", "my_model.yaml"]) == 0
